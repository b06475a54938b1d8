"""Up to 16 rows times a weight that goes straight to registers, run by our interpreter: turns, tiles, norm and gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.triton import gemm_table, linear_stream
from quire.kernels.triton.gemm_table import GemmChoice
from quire.kernels.triton.linear_few import linear_reference
from quire.kernels.triton.linear_stream import StreamShape, fits
from quire.ops.triton import TritonOps
from tests.kernels.triton.gluon_interpreter import interpreting
from tests.kernels.triton.test_codes_row import activated
from tests.kernels.triton.test_linear_codes import reversed_range


def run(x: Tensor, weight: Tensor, sizes: StreamShape, **more: Any) -> Tensor:
    assert fits(x.shape[0], *weight.shape, sizes, more.get("gated") is not None)
    with interpreting(reversed_range, None, ("weight", "gain"), {"activate": activated}):
        return linear_stream.linear_stream(x, weight, sizes=sizes, pdl=True, **more)


def whole(*size: int, seed: int = 0) -> Tensor:
    """Small integers: floats add them exactly, in any order."""
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("rows", "features", "width", "sizes"),
    [
        (1, 64, 512, StreamShape(16, 64, 8)),
        (5, 64, 1024, StreamShape(16, 64, 4, 1, 2)),
        (8, 200, 512, StreamShape(16, 32, 4, 3, 2)),
        (9, 96, 256, StreamShape(32, 32, 2, 2, 20)),
        (16, 130, 768, StreamShape(16, 64, 4, 1, 1)),
    ],
)
def test_sums_are_those_of_a_gemm(rows: int, features: int, width: int, sizes: StreamShape) -> None:
    """Also of tiles that a weight fills in part, and of programs with more steps than there are tiles."""
    x, weight = whole(rows, width), whole(features, width, seed=1)
    bias, residual = whole(features, seed=2), whole(rows, features, seed=3)
    want = x.double() @ weight.double().t() + bias.double() + residual.double()
    got = run(x, weight, sizes, bias=bias, residual=residual)
    assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("kind", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (6, 2), (11, 1)])
def test_norm_and_gate_are_those_of_the_reference(kind: str | None, rows: int, steps: int) -> None:
    x, gain, weight = numbers(rows, 512) * 3, 1 + numbers(512, seed=1).float() / 8, numbers(96, 512, seed=2)
    bias = numbers(96, seed=3)
    want = linear_reference(x.float(), weight.float(), bias.float(), norm=gain, eps=1e-5, gated=kind)
    got = run(x, weight, StreamShape(16, 32, 4, steps, 2), bias=bias, norm=gain, eps=1e-5, gated=kind)
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02 * float(want.abs().mean()))


def test_what_does_not_divide_is_left_to_another_kernel() -> None:
    assert fits(16, 96, 512, StreamShape(16, 64, 8)) and not fits(17, 96, 512, StreamShape(16, 64, 8))
    assert not fits(1, 96, 768, StreamShape(16, 64, 8))
    assert fits(1, 96, 512, StreamShape(32, 64, 8)) and not fits(1, 96, 512, StreamShape(32, 64, 8), gated=True)


def test_operations_run_it_where_the_table_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    launched: list[int] = []

    def noted(x: Tensor, *given: Any, **named: Any) -> Tensor:
        launched.append(x.shape[0])
        return linear_stream_itself(x, *given, **named)

    linear_stream_itself = linear_stream.linear_stream
    monkeypatch.setattr(linear_stream, "available", lambda *_: True)
    monkeypatch.setattr(linear_stream, "linear_stream", noted)
    monkeypatch.setattr(gemm_table, "lookup", lambda *_: GemmChoice("stream", (16, 32, 4, 1, 2)))
    ops, weight, gain = TritonOps("cpu", torch.bfloat16), numbers(96, 512, seed=2), torch.rand(512) + 0.5
    packed, x, residual = ops.pack_linear(weight), numbers(8, 512), numbers(8, 96, seed=4)
    with interpreting(reversed_range, None, ("weight", "gain"), {"activate": activated}):
        got = [ops.linear(x, packed, residual), ops.norm_linear(x[:1], gain, 1e-6, packed),
               ops.norm_linear(x[:1], gain, 1e-6, packed, "silu")]  # fmt: skip
    wide = weight.float()
    want = [linear_reference(x.float(), wide, None, residual.float()),
            linear_reference(x[:1].float(), wide, norm=gain, eps=1e-6),
            linear_reference(x[:1].float(), wide, norm=gain, eps=1e-6, gated="silu")]  # fmt: skip
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03 * float(expected.abs().mean()))
    assert launched == [8, 1, 1]
    assert ops.linear(numbers(17, 512), packed).shape == (17, 96) and launched == [8, 1, 1]
