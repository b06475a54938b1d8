"""One row times a weight of fp8, run by our interpreter: order of columns, scales, uneven shares, what is fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.quantized import Fp8Weight
from quire.kernels.triton import codes_row, gemm_table, linear_prefetch
from quire.kernels.triton.activation import act_mul_reference
from quire.kernels.triton.codes_row import CodesRowShape, fits_bytes, linear_bytes_row
from quire.kernels.triton.gemm_table import GemmChoice
from quire.kernels.triton.norm import rms_norm_reference
from quire.ops.device_weights import to_int8
from quire.ops.triton import TritonOps
from tests.kernels.triton.gluon_interpreter import interpreting
from tests.kernels.triton.test_codes_row import ASSEMBLY, row
from tests.kernels.triton.test_linear_codes import reversed_range

CONSTANT = ("weight", "scales", "gain")


def run(x: Tensor, weight: Tensor, scales: Tensor, sizes: CodesRowShape, **more: Any) -> Tensor:
    scratch = linear_prefetch.PrefetchScratch.allocate("cpu", 1 << 16)
    assert fits_bytes(weight, scales, sizes, more.get("gated") is not None, more.get("norm") is not None, scratch)
    with interpreting(reversed_range, None, CONSTANT, ASSEMBLY):
        found = linear_bytes_row(x, weight, scales, sizes=sizes, scratch=scratch, pdl=True, **more)
    assert not scratch.arrived.any()
    return found


def bytes_of(features: int, width: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(features, width, generator=generator).to(torch.float8_e4m3fn)


def floats_of(weight: Tensor, scales: Tensor) -> Tensor:
    each = scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(128, 1)
    return weight.double() * each.double()


@pytest.mark.parametrize(
    ("features", "width", "blocks", "sizes"),
    [
        (64, 1024, False, CodesRowShape(16, 8)),
        (256, 1024, True, CodesRowShape(32, 4, 1, 1)),
        (208, 320, False, CodesRowShape(16, 2, 3, 2)),  # runs of 64 columns, of which the last is one warp's only
        (96, 2176, False, CodesRowShape(32, 8, 2, 1, 0, 2)),
        (96, 1152, True, CodesRowShape(16, 4, 4, 2, 0, 9)),
        (64, 640, False, CodesRowShape(64, 2, 1, 9, 0, 9)),
        (96, 2176, True, CodesRowShape(32, 4, 1, 2, 0, 1, 4)),  # 17 runs in turns of 4: parts of 8, 4, 4 and 1
        (48, 704, False, CodesRowShape(16, 2, 1, 1, 0, 0, 3)),
    ],
)
def test_products_are_those_with_the_floats_that_bytes_and_scales_stand_for(
    features: int, width: int, blocks: bool, sizes: CodesRowShape
) -> None:
    """Numbers that floats add exactly, in any order."""
    generator = torch.Generator().manual_seed(width)

    def small(*size: int) -> Tensor:
        return torch.randint(-2, 3, size, generator=generator).float()

    x, residual, bias = small(1, width).bfloat16(), small(1, features).bfloat16(), small(features).bfloat16()
    weight = small(features, width).to(torch.float8_e4m3fn)
    scales = 2.0 ** small(*((features, width // 128) if blocks else (features,)))
    want = x.double() @ floats_of(weight, scales).t() + bias.double() + residual.double()
    assert torch.equal(run(x, weight, scales, sizes, bias=bias, residual=residual), want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("peak", [1e-6, 1.0, 3e4])
def test_a_row_loses_nothing_in_fp16(dtype: torch.dtype, peak: float) -> None:
    """Against sums in float64: half a unit of the outputs' type, also where a row is far from 1 and has a peak."""
    x = row(1024) * peak / 1000
    x[0, 100] = peak
    x, weight, scales = x.to(dtype), bytes_of(64, 1024), torch.rand(64) / 16 + 0.01
    floats = floats_of(weight, scales)
    want = x.double() @ floats.t()
    got = run(x, weight, scales, CodesRowShape(16, 4))
    kind = torch.finfo(dtype)
    room = kind.eps / 2 * want.abs() + kind.smallest_normal * kind.eps + 2e-6 * (x.double().abs() @ floats.abs().t())
    assert bool(((got.double() - want).abs() <= room).all())


@pytest.mark.parametrize(("steps", "width"), [(1, 512), (2, 512), (1, 1536), (1, 1152)])
@pytest.mark.parametrize("kind", [None, "silu", "gelu_tanh"])
def test_norm_and_gate_are_those_of_kernels_of_their_own(kind: str | None, steps: int, width: int) -> None:
    x, gain, bias = row(width) * 3, 1 + row(width, 1)[0].float() / 8, row(96, 2)[0]
    weight, scales = bytes_of(96, width), torch.rand(96) / 16 + 0.01
    want = rms_norm_reference(x.float(), gain, 1e-5) @ floats_of(weight, scales).float().t() + bias.float()
    if kind is not None:
        want = act_mul_reference(want, kind)
    sizes = CodesRowShape(16, 4 if width == 512 else 2, steps, 1, 0, 1)
    got = run(x, weight, scales, sizes, norm=gain, eps=1e-5, gated=kind, bias=bias)
    torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.01 * float(want.abs().mean()))


def test_zeros_infinities_and_nan_stay_what_they_are() -> None:
    x, weight, scales = torch.zeros(1, 512, dtype=torch.bfloat16), bytes_of(32, 512), torch.ones(32)
    assert torch.equal(run(x, weight, scales, CodesRowShape(16, 2)), torch.zeros(1, 32, dtype=torch.bfloat16))
    for wrong in (float("nan"), float("inf"), float("-inf")):
        x[0, 77] = wrong
        assert not bool(run(x, weight, scales, CodesRowShape(16, 2)).isfinite().any())


def test_what_it_cannot_multiply() -> None:
    weight, scales, sizes = bytes_of(96, 512), torch.ones(96), CodesRowShape(16, 4)
    assert fits_bytes(weight, scales, sizes) and not fits_bytes(weight, scales, CodesRowShape(16, 8))  # four runs
    parts, scratch = CodesRowShape(16, 2, 1, 1, 0, 0, 2), linear_prefetch.PrefetchScratch.allocate("cpu", 192)
    assert fits_bytes(weight, scales, parts, scratch=scratch) and not fits_bytes(weight, scales, parts)
    assert not fits_bytes(weight, scales, parts, normed=True, scratch=scratch)
    assert fits_bytes(weight, scales, sizes, True) and not fits_bytes(weight, scales, CodesRowShape(32, 4), True)
    assert fits_bytes(weight, torch.ones(96, 4), sizes) and not fits_bytes(weight, torch.ones(96, 8), sizes)
    assert not fits_bytes(weight.view(torch.int8), scales, sizes)
    assert not fits_bytes(bytes_of(96, 544), scales, sizes)


@pytest.mark.parametrize("blocks", [False, True])
def test_operations_run_the_kernel_that_the_table_names(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    """And another one in deterministic mode, for int8 and for a row whose scale the checkpoint fixes."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    torch.manual_seed(3)
    launched: list[str] = []

    def noted(*given: Any, **named: Any) -> Tensor:
        launched.append("row")
        return linear_bytes_row(*given, **named)

    monkeypatch.setattr(linear_prefetch, "available", lambda _: True)
    monkeypatch.setattr(gemm_table, "lookup", lambda *_: GemmChoice("bytes_row", (16, 4, 1, 2)))
    monkeypatch.setattr(codes_row, "linear_bytes_row", noted)
    codes, scales = bytes_of(96, 512), torch.rand(96, 4 if blocks else 1) + 0.5
    weight = Fp8Weight(codes, scales, 128 if blocks else 512)
    floats = floats_of(codes, scales if blocks else scales[:, 0]).float()
    ops = TritonOps("cpu", torch.bfloat16)
    packed = ops.pack_quantized([weight])
    x, residual, gain = row(512), row(96, 1), torch.rand(512) + 0.5
    normed = rms_norm_reference(x.float(), gain, 1e-6) @ floats.t()
    with interpreting(reversed_range, None, CONSTANT, ASSEMBLY):
        got = [ops.linear(x, packed, residual), ops.norm_linear(x, gain, 1e-6, packed),
               ops.norm_linear(x, gain, 1e-6, packed, "silu")]  # fmt: skip
    for found, want in zip(got, (x.float() @ floats.t() + residual.float(), normed, act_mul_reference(normed, "silu"))):
        torch.testing.assert_close(found.float(), want, rtol=0.02, atol=0.02 * float(want.abs().mean()))
    assert launched == ["row"] * 3
    int8 = ops.pack_quantized([to_int8(floats.bfloat16())])
    want = x.float() @ floats.t()
    close = {"rtol": 0.1, "atol": 0.1 * float(want.abs().mean())}
    torch.testing.assert_close(ops.linear(x, int8).float(), want, **close)
    ops = TritonOps("cpu", torch.bfloat16, deterministic=True)
    torch.testing.assert_close(ops.linear(x, ops.pack_quantized([weight])).float(), want, **close)
    assert launched == ["row"] * 3
