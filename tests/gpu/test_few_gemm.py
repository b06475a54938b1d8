"""GEMMs of up to eight rows with norm, gate and residual, on a real GPU: right, the same each time, never too early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.cuda.few_gemm import FewShape, available, fits, linear_few_rows
    from quire.kernels.triton import gemm_table
    from quire.kernels.triton.linear_few import linear_reference
    from quire.ops.interface import Fusion
    from quire.ops.triton import TritonOps

HIDDEN, INNER = 2048, 6144
SHAPES = ((4, 8, 1, 3), (4, 4, 2, 5), (2, 4, 4, 5), (8, 8, 1, 2))


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not available(torch.device("cuda"), torch.bfloat16):
        pytest.skip("needs Hopper and NVRTC")


def numbers(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.float32)


def weight_of(features: int, width: int) -> Tensor:
    return (numbers(features, width) / width**0.5).bfloat16()


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.03)


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("rows", [2, 5, 8])
@torch.inference_mode()
def test_a_chain_of_gemms_is_right_though_each_begins_before_the_one_before_ends(
    sizes: tuple[int, ...], rows: int
) -> None:
    """Norm and gate, then a residual, norm alone: each reads what the one before wrote."""
    torch.manual_seed(3)
    shape = FewShape.of(sizes)
    up, down, last = weight_of(2 * INNER, HIDDEN), weight_of(HIDDEN, INNER), weight_of(544, HIDDEN)
    gain = (numbers(HIDDEN) / 8 + 1).bfloat16()

    def run(x: Tensor) -> list[Tensor]:
        assert fits(x, up, shape, gain)
        inner = linear_few_rows(x, up, shape=shape, norm=gain, eps=1e-6, gated=True, pdl=True)
        assert inner is not None and fits(inner, down, shape)
        rows = linear_few_rows(inner, down, x, shape=shape, pdl=True)
        assert rows is not None
        logits = linear_few_rows(rows, last, shape=shape, norm=gain, eps=1e-6, pdl=True)
        assert logits is not None
        return [inner, rows, logits]

    for _ in range(4):
        x = numbers(rows, HIDDEN).bfloat16()
        inner, summed, logits = run(x)
        close(inner, linear_reference(x, up, norm=gain.float(), eps=1e-6, gated="silu"))
        close(summed, linear_reference(inner, down, None, x))
        close(logits, linear_reference(summed, last, norm=gain.float(), eps=1e-6))
        assert all(torch.equal(first, second) for first, second in zip((inner, summed, logits), run(x), strict=True))


@pytest.mark.parametrize("sizes", SHAPES)
@torch.inference_mode()
def test_rows_in_memory_that_an_earlier_kernel_has_read_are_the_new_ones(sizes: tuple[int, ...]) -> None:
    """Two buffers in turns: a multiprocessor that had a buffer's old rows in its first cache must not read those."""
    torch.manual_seed(5)
    shape, gain = FewShape.of(sizes), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = [weight_of(HIDDEN, HIDDEN) for _ in range(4)]
    start, here, there = numbers(5, HIDDEN).bfloat16(), *torch.zeros(2, 5, HIDDEN, device="cuda").bfloat16()

    def run(pdl: bool) -> Tensor:
        here.copy_(start)
        given, made = here, there
        for turn in range(60):
            linear_few_rows(given, weights[turn % 4], shape=shape, norm=gain, eps=1e-6, out=made, pdl=pdl)
            if not pdl:
                torch.cuda.synchronize()
            given, made = made, given
        return given

    want = run(pdl=False).clone()
    run(pdl=True)  # compiled and loaded before a graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(pdl=True)
    for _ in range(20):
        there.zero_()
        graph.replay()
        assert torch.equal(here, want)


@torch.inference_mode()
def test_operations_run_it_where_the_table_names_it_and_can_be_told_not_to() -> None:
    torch.manual_seed(4)
    on, off = (TritonOps("cuda", torch.bfloat16, pdl=True, few_rows=few) for few in (True, False))
    assert gemm_table.lookup_few(5, 4096, 12_288, gemm_table.PLAIN) is not None
    x, residual, gain = numbers(5, 12_288).bfloat16(), numbers(5, 4096).bfloat16(), torch.ones(4096, device="cuda")
    down, up = on.pack_linear(weight_of(4096, 12_288)), weight_of(24_576, 4096)
    assert on.fusion(5, 4096) is Fusion.SUM_WITH_NORM  # a model of another gate and up
    up = on.pack_linear(up)
    assert on.fusion(5, 4096) is Fusion.NORM_WITH_GEMM and off.fusion(5, 4096) is Fusion.SUM_WITH_NORM
    assert on.fusion(9, 4096) is Fusion.SUM_WITH_NORM and on.fusion(5, 1280) is Fusion.SUM_WITH_NORM
    close(on.linear(x, down, residual), linear_reference(x, down.weight, None, residual))
    close(on.norm_linear(residual, on.norm_gain(gain), 1e-6, up, "silu"),
          linear_reference(residual, up.weight, norm=gain, eps=1e-6, gated="silu"))  # fmt: skip
    # A weight that the table does not have, and an activation that the kernel does not know.
    other = on.pack_linear(weight_of(4128, 4096))
    close(on.norm_linear(residual, gain, 1e-6, other), linear_reference(residual, other.weight, norm=gain, eps=1e-6))
    close(on.norm_linear(residual, gain, 1e-6, up, "gelu"),
          linear_reference(residual, up.weight, norm=gain, eps=1e-6, gated="gelu"))  # fmt: skip
