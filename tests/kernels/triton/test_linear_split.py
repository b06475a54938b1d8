"""Products split over columns beside their reference, in the interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.linear_few import linear_reference
from quire.kernels.triton.linear_split import SplitScratch, SplitShape, fits, linear_split

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = (SplitShape(16, 32, 4, 2, 1), SplitShape(32, 64, 4, 3, 4), SplitShape(64, 32, 4, 2, 3))


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize(("rows", "features", "width"), [(2, 96, 256), (17, 70, 200), (32, 128, 384), (40, 33, 100)])
def test_parts_add_up_to_the_product(sizes: SplitShape, rows: int, features: int, width: int) -> None:
    x, weight = numbers(rows, width), numbers(features, width, seed=1)
    bias, residual = numbers(features, seed=2), numbers(rows, features, seed=3)
    scratch = SplitScratch.allocate(DEVICE, 1 << 16)
    assert fits(rows, features, sizes, scratch)
    for extras in ((None, None), (bias, residual)):
        for _ in range(2):  # the counters are back at 0 after the first
            got = linear_split(x, weight, *extras, sizes=sizes, scratch=scratch)
            assert torch.allclose(got, linear_reference(x, weight, *extras), atol=1e-4)
    assert not scratch.arrived.any()


def test_parts_without_a_place_for_their_sums_do_not_fit() -> None:
    scratch = SplitScratch.allocate("cpu", 1000)
    assert fits(8, 1000, SplitShape(parts=1), None)
    assert not fits(8, 1000, SplitShape(parts=4), None)
    assert not fits(8, 1000, SplitShape(parts=4), scratch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pdl", [False, True])
def test_half_precision_on_tensor_cores(pdl: bool) -> None:
    scratch = SplitScratch.allocate(DEVICE)
    for rows, features, width in ((2, 4096, 4096), (32, 6144, 4096), (64, 4096, 12288), (128, 1024, 3072)):
        x = numbers(rows, width).bfloat16()
        weight = numbers(features, width, seed=1).bfloat16()
        for sizes in (SplitShape(64, 128, 4, 4, 4), SplitShape(128, 64, 4, 4, 8), SplitShape(32, 128, 4, 5, 1)):
            got = linear_split(x, weight, sizes=sizes, scratch=scratch, pdl=pdl)
            want = x.float() @ weight.float().t()
            assert (got.float() - want).abs().max() <= 0.01 * want.abs().max(), (rows, features, width, sizes)
