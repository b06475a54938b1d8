"""GEMMs of few rows with norm, gate and residual in them, on a real GPU: the bits of deterministic mode's kernels one
by one, and never before the rows are there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.cuda.fixed_few import MOST_ROWS, RowNorm, available, linear_few_rows
    from quire.kernels.slices import Slices
    from quire.kernels.triton import activation, linear_fixed, norm

EPS = 1e-6
NORMED = ((4096, 1024, False, False), (6144, 1024, True, False), (1152, 896, False, True), (9728, 896, True, True),
          (960, 576, False, False), (3072, 576, True, False), (64, 1536, False, True))  # fmt: skip
"""Features of the weight, columns, gate, bias."""
SLICED = (("of_heads", 16, 128, 1024), ("of_width", 3072, 1024), ("of_heads", 14, 64, 896), ("of_width", 4864, 896),
          ("of_heads", 9, 64, 576), ("of_width", 1536, 576))  # fmt: skip
"""Slices, and features of the output."""


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not available(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16):
        pytest.skip("needs Hopper and NVRTC")
    torch.manual_seed(11)


def numbers(*size: int) -> Tensor:
    return torch.randn(size, device="cuda").bfloat16()


def different(found: Tensor | None, want: Tensor) -> int:
    assert found is not None
    return int((found != want).sum())


@pytest.mark.parametrize("shape", NORMED)
@torch.inference_mode()
def test_a_norm_and_a_gate_have_the_bits_of_kernels_one_by_one(shape: tuple[int, int, bool, bool]) -> None:
    """Squares of very different sizes, so that another order would show."""
    features, width, gated, biased = shape
    weight, bias = numbers(features, width) / width**0.5, numbers(features) if biased else None
    x = numbers(MOST_ROWS, width) * torch.exp2(torch.randint(-4, 5, (MOST_ROWS, width), device="cuda"))
    x = x.bfloat16()
    wide = torch.rand(width, device="cuda") + 0.5
    for gain in (wide, wide.bfloat16()):
        rows = norm.rms_norm(x, gain.float(), EPS, pdl=True)
        want = linear_fixed.linear_fixed(rows, weight, bias)
        want = activation.act_mul(want, "silu") if gated else want
        for count in range(1, MOST_ROWS + 1):
            found = linear_few_rows(x[:count].clone(), weight, bias, norm=RowNorm(gain, EPS), gated=gated, pdl=True,
                                    watched=True)  # fmt: skip
            assert (count, different(found, want[:count])) == (count, 0)


@pytest.mark.parametrize("made", SLICED)
@torch.inference_mode()
def test_sums_in_slices_and_a_residual_have_the_bits_of_kernels_one_by_one(made: tuple[str, int]) -> None:
    name, *sizes, features = made
    slices = getattr(Slices, name)(*sizes)
    weight, bias = numbers(features, slices.width) / slices.width**0.5, numbers(features)
    x, stream = numbers(MOST_ROWS, slices.width), 8 * numbers(MOST_ROWS, features)
    for added in (None, bias):
        want = linear_fixed.linear_fixed(x, weight, added, None, slices)
        total = stream.clone()
        norm.add_rms_norm(want, total, torch.ones(features, device="cuda"), EPS)
        for count in range(1, MOST_ROWS + 1):
            given = x[:count].clone()
            found = linear_few_rows(given, weight, added, slices=slices, pdl=True, watched=True)
            if found is None:  # too many bytes for so many rows
                assert count > 4 and slices.width > 4096
                continue
            assert (count, different(found, want[:count])) == (count, 0)
            both = linear_few_rows(given, weight, added, stream[:count].clone(), slices=slices, pdl=True, watched=True)
            assert (count, different(both, total[:count])) == (count, 0)


def layers(x: Tensor, weights: list[Tensor], gain: Tensor) -> Callable[[], Tensor]:
    """Four of them: norm and GEMM with its gate, then slices and the residual, one behind the other."""
    slices = Slices.of_width(weights[1].shape[1])

    def run() -> Tensor:
        rows = x
        for _ in range(4):
            inner = linear_few_rows(rows, weights[0], norm=RowNorm(gain, EPS), gated=True, pdl=True, watched=True)
            assert inner is not None
            found = linear_few_rows(inner, weights[1], None, rows, slices=slices, pdl=True, watched=True)
            assert found is not None
            rows = found
        return rows

    return run


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_nothing_is_read_before_it_is_written(rows: int) -> None:
    """Kernels that start early, in a graph that runs again and again over what it left."""
    width, inner = 1024, 3072
    weights = [numbers(2 * inner, width) / width**0.5, numbers(width, inner) / inner**0.5]
    x, gain = numbers(rows, width), torch.ones(width, device="cuda", dtype=torch.bfloat16)
    run = layers(x, weights, gain)
    want = x
    for _ in range(4):
        gated = activation.act_mul(
            linear_fixed.linear_fixed(norm.rms_norm(want, gain, EPS), weights[0]), "silu")
        want = want + linear_fixed.linear_fixed(gated, weights[1], None, None, Slices.of_width(inner))
    assert torch.equal(run(), want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, want)
