"""GEMMs that prefetch their weights, on a real GPU: right, the same each time, and never too early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.triton.linear_prefetch import PrefetchScratch, PrefetchShape, available, fits, linear_prefetch

ROWS = {
    (1, 5, 4, 0): (1, 2, 7, 8, 16),
    (1, 6, 2, 0): (1, 2, 7, 8, 32, 48, 64),
    (1, 4, 2, 1): (7, 16, 48, 80, 100, 128),
    (3, 3, 1, 0): (8, 80, 96, 100, 112, 128),
    (3, 3, 2, 0): (2, 32, 64),
    (5, 4, 1, 0): (1, 16, 48, 64),
    (2, 4, 1, 0): (7, 96, 112),
}
"""Of each shape, some of those that fit: nearly all the time goes to compilation, and every shape, number of boxes and
height of a box is a kernel. These are 28, and one more without a wait for the previous kernel."""
FEATURES = (2048, 1008)
"""Of two GEMMs in a row: the second is no multiple of any tile, but compiled as the first is."""


def numbers(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.float32)


@pytest.mark.parametrize("shape", ROWS)
@torch.inference_mode()
def test_a_gemm_is_right_and_the_same_each_time_though_it_begins_before_its_rows_are_there(
    shape: tuple[int, int, int, int],
) -> None:
    if not available(torch.device("cuda")):
        pytest.skip("needs Hopper and a Triton with Gluon")
    sizes, scratch = PrefetchShape(*shape), PrefetchScratch.allocate("cuda")
    # What nobody has left must not come out as a number.
    scratch.partial.fill_(float("nan"))
    torch.manual_seed(5)
    weights = [(numbers(features, 2048) / 2048**0.5).bfloat16() for features in FEATURES]
    for rows in ROWS[shape]:
        x = numbers(rows, 2048).bfloat16()
        assert all(fits(x, weight, sizes, scratch) for weight in weights), f"{rows} rows"
        # A bias, a residual, both or neither: the same for all numbers of rows up to 8, which share a kernel.
        kind = sum(shape) + rows // 16
        biases = [numbers(features).bfloat16() if kind & 1 else None for features in FEATURES]
        residuals = [numbers(rows, features).bfloat16() if kind & 2 else None for features in FEATURES]
        for pdl in (True, False) if shape == (1, 5, 4, 0) and rows <= 8 else (True,):
            seen: list[list[Tensor]] = []
            for _ in range(2):
                seen.append([x])
                for given in zip(weights, biases, residuals):  # the rows of the second are the result of the first
                    seen[-1].append(linear_prefetch(seen[-1][-1], *given, sizes=sizes, scratch=scratch, pdl=pdl))
            for place, (weight, *added) in enumerate(zip(weights, biases, residuals)):
                what = f"{rows} rows, GEMM {place}, pdl {pdl}"
                want = seen[0][place].double() @ weight.double().t()
                want = sum((each.double() for each in added if each is not None), start=want)
                wrong = ~((seen[0][place + 1].double() - want).abs() <= 2**-8 * want.abs() + 2e-3)
                assert not wrong.any(), f"{what}: {int(wrong.sum())} are wrong"
                assert torch.equal(seen[0][place + 1], seen[1][place + 1]), what
            assert not scratch.arrived.any(), f"{rows} rows, pdl {pdl}"


@torch.inference_mode()
def test_a_gemm_in_float16_is_right() -> None:
    if not available(torch.device("cuda")):
        pytest.skip("needs Hopper and a Triton with Gluon")
    x, weight = numbers(16, 2048).half(), (numbers(1008, 2048) / 2048**0.5).half()
    found = linear_prefetch(x, weight, sizes=PrefetchShape(1, 5, 4, 0), scratch=PrefetchScratch.allocate("cuda"))
    want = x.double() @ weight.double().t()
    assert bool(((found.double() - want).abs() <= 2**-10 * want.abs() + 5e-4).all())
