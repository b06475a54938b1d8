"""One row times a weight of 4-bit codes, run by our interpreter with its assembler: order of codes, digits, scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.quantized import QuantizedWeight
from quire.kernels.triton import codes_row, gemm_table, linear_codes, linear_prefetch
from quire.kernels.triton import codes_row_kernel as kernel
from quire.kernels.triton.activation import act_mul_reference
from quire.kernels.triton.codes_row import CodesRowShape, fits, linear_codes_row
from quire.kernels.triton.gemm_table import GemmChoice
from quire.kernels.triton.linear_codes import PackedCodes, pack, unpacked
from quire.kernels.triton.linear_prefetch import PrefetchScratch
from quire.kernels.triton.norm import rms_norm_reference
from quire.ops import device_formats
from quire.ops.triton import TritonOps
from tests.kernels.triton import ptx
from tests.kernels.triton.gluon_interpreter import interpreting
from tests.kernels.triton.gluon_memory import Pointer, Value
from tests.kernels.triton.test_linear_codes import reversed_range, weight_of

KINDS = ["silu", "gelu_tanh", "gelu", "relu"]


def assembled(text: str, outputs: int) -> Any:
    """What stands for an `inline_asm_elementwise` of integers with `pack=4` and outputs of bytes: four neighbours are
    four words, and the bytes of each word that comes out are four neighbours."""

    def run(numbers: Value) -> tuple[Value, ...]:
        words = list(numbers.data.long().reshape(*numbers.shape[:-1], -1, 4).unbind(-1))
        found = ptx.run(text, outputs, words)
        parts = [torch.stack([word >> 8 * byte & 255 for byte in range(4)], -1) for word in found]
        return tuple(Value(part.to(torch.uint8).view(torch.int8).reshape(numbers.shape)) for part in parts)

    return run


def larger(most: Value, bits: Value) -> Value:
    """The same with `pack=2` of numbers of 16 bits: two neighbours are a word."""
    words = [(each.data.long() & 0xFFFF).reshape(-1, 2) @ torch.tensor([1, 1 << 16]) for each in (most, bits)]
    (found,) = ptx.run(kernel._LARGER.value, 1, words)
    halves = torch.stack([found & 0xFFFF, found >> 16], -1)
    return Value(halves.to(torch.int32).to(torch.int16).reshape(most.data.shape))


def activated(x: Value, kind: int) -> Value:
    pairs = torch.stack([x.data, torch.ones_like(x.data)]).reshape(1, -1)
    return Value(act_mul_reference(pairs, KINDS[kind]).reshape(x.data.shape))


def asked(places: Pointer, size: Value, lines: Value) -> None:
    """The copy engine takes 16 bytes or a multiple, from a multiple on, of what there is."""
    first = places.checked(None)[0] * places.flat.element_size()
    last = first + size.data.long()
    assert bool((size.data > 0).all()) and not int(((first | size.data) % 16).sum()) and lines.data[0] == len(first)
    assert int(last.max()) <= places.flat.nbytes and len(set(first.tolist())) == len(first)


ASSEMBLY = {
    "_bytes": assembled(kernel._BYTES.value, 8), "_planes": assembled(kernel._PLANES.value, 3), "activate": activated,
    "_ask": asked, "_larger": larger,
}  # fmt: skip


def run(x: Tensor, packed: PackedCodes, sizes: CodesRowShape, **more: Any) -> Tensor:
    """Programs in both orders: the bits are the same whichever part of a tile comes last, and no part is left over."""
    scratch = PrefetchScratch.allocate("cpu", 1 << 16)
    assert fits(packed, sizes, more.get("gated") is not None, more.get("norm") is not None, scratch)
    found = []
    for order in (range, reversed_range)[: 2 if sizes.parts > 1 else 1]:
        with interpreting(order, None, ("weight", "scales", "gain"), ASSEMBLY):
            found.append(linear_codes_row(x, packed, sizes=sizes, scratch=scratch, pdl=True, **more))
        assert not scratch.arrived.any()
    assert torch.equal(found[0], found[-1]) or not bool(found[0].isfinite().all())
    return found[-1]


def row(width: int, seed: int = 0) -> Tensor:
    return torch.randn(1, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("features", "width", "group", "offsets", "sizes"),
    [
        (64, 1024, 128, False, CodesRowShape(16, 8)),
        (256, 1024, 128, True, CodesRowShape(32, 4, 1, 1)),
        (200, 512, 64, True, CodesRowShape(16, 4, 3, 2)),
        (130, 768, 384, False, CodesRowShape(16, 2, 2, 20)),
        (128, 2048, 2048, True, CodesRowShape(64, 4, 2)),
        (96, 384, 192, False, CodesRowShape(32, 2, 1, 2)),
        (48, 1536, 128, True, CodesRowShape(16, 2, 2, 4)),
        (80, 1152, 128, True, CodesRowShape(16, 4, 3, 2, 0, 5)),  # nine runs: the last turn is one warp's
        (128, 1408, 128, False, CodesRowShape(32, 8, 2, 1, 0, 1)),
        (80, 1024, 128, True, CodesRowShape(32, 2, 1, 1, 0, 0, 2)),
        (64, 2176, 128, True, CodesRowShape(32, 4, 1, 2, 0, 1, 4)),  # 17 runs in turns of 4: parts of 8, 4, 4 and 1
        (96, 1408, 128, False, CodesRowShape(16, 2, 1, 1, 0, 2, 3)),
        (48, 3072, 512, True, CodesRowShape(16, 2, 1, 9, 0, 0, 6)),
        (32, 960, 64, False, CodesRowShape(16, 1, 1, 2, 0, 1, 7)),
        (32, 4224, 128, False, CodesRowShape(16, 1, 1, 1, 0, 0, 3)),  # 11 turns of a part: its row is read twice
    ],
)
def test_products_with_codes_are_those_with_the_floats_they_stand_for(
    features: int, width: int, group: int, offsets: bool, sizes: CodesRowShape
) -> None:
    """Numbers that floats add exactly, in any order: scales are powers of two, and the row is of small integers."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-2, 3, (1, width), generator=generator).bfloat16()
    weight = weight_of(features, width, group, offsets)
    residual, bias = (torch.randint(-2, 3, (1, features), generator=generator).bfloat16() for _ in range(2))
    want = x.double() @ weight.dequantized().double().t() + bias.double() + residual.double()
    got = run(x, pack(weight, x.dtype), sizes, bias=bias[0], residual=residual)
    assert torch.equal(got, want.bfloat16())


def plain_weight(features: int, width: int, offsets: bool, seed: int = 3) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (features, width), dtype=torch.uint8, generator=generator)
    scales = 0.01 + torch.rand(features, width // 128, generator=generator) / 64
    return QuantizedWeight(codes, scales, -scales * 7.3 if offsets else None, 0 if offsets else 8, 4, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("peak", [1.0, 3e4])
def test_a_row_loses_nothing_as_digits(dtype: torch.dtype, peak: float) -> None:
    """Against sums in float64 of the weight's own numbers: half a unit of the outputs' type, also with a peak in the
    row that leaves the other numbers few of the 22 bits."""
    x = row(1024).to(dtype)
    x[0, 100] = peak
    packed = pack(plain_weight(64, 1024, offsets=True), dtype)
    exact = PackedCodes(packed.words, packed.scales, 64, 1024, 128, dtype)
    floats = _floats(exact)
    want = x.double() @ floats.t()
    got = run(x, packed, CodesRowShape(16, 4))
    unit = torch.finfo(dtype).eps / 2
    size = x.double().abs() @ floats.abs().t()
    assert bool(((got.double() - want).abs() <= unit * want.abs() + 2e-6 * size).all())


def _floats(packed: PackedCodes) -> Tensor:
    """The weight as the kernel multiplies it: scales and offsets in the activations' type, products not rounded."""
    wide = PackedCodes(packed.words, _widened(packed), packed.features, packed.width, packed.group, torch.float32)
    tiles, slabs = wide.words.shape[0] // 32, wide.width // 64
    words = wide.words.view(tiles, 32, slabs, 32).transpose(1, 2).contiguous().view(torch.uint8)
    codes = torch.stack([words & 15, words >> 4], -1).view(tiles, slabs, 1, 8, 8, 4, 4, 2, 2, 2)
    whole = codes.permute(0, 3, 9, 4, 1, 2, 6, 8, 5, 7).reshape(-1, wide.width)[: wide.features]
    grouped = (whole.double() - 8).view(wide.features, -1, wide.group)
    pairs = wide.scales.double()
    return (grouped * pairs[..., :1] + pairs[..., 1:]).view(wide.features, -1)


def _widened(packed: PackedCodes) -> Tensor:
    return packed.scales.view(packed.dtype).view(-1, packed.features, 2).transpose(0, 1)


@pytest.mark.parametrize(("steps", "width"), [(1, 512), (2, 512), (1, 1536)])
@pytest.mark.parametrize("kind", [None, "silu", "gelu_tanh"])
def test_norm_and_gate_are_those_of_kernels_of_their_own(kind: str | None, steps: int, width: int) -> None:
    """A row of one turn, and one of six, which is not held in registers."""
    x, gain = row(width) * 3, 1 + row(width, 1)[0].float() / 8
    packed = pack(plain_weight(96, width, offsets=False), x.dtype)
    want = rms_norm_reference(x.float(), gain, 1e-5) @ unpacked(packed).float().t()
    bias = row(96, 2)[0]
    want = want + bias.float()
    if kind is not None:
        want = act_mul_reference(want, kind)
    got = run(
        x, packed, CodesRowShape(16, 4 if width == 512 else 2, steps, 1), norm=gain, eps=1e-5, gated=kind, bias=bias
    )
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02 * float(want.abs().mean()))


def test_zeros_infinities_and_nan_stay_what_they_are() -> None:
    packed = pack(plain_weight(32, 512, offsets=False), torch.bfloat16)
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    assert torch.equal(run(x, packed, CodesRowShape(16, 2)), torch.zeros(1, 32, dtype=torch.bfloat16))
    for wrong in (float("nan"), float("inf"), float("-inf")):
        x[0, 77] = wrong
        assert not bool(run(x, packed, CodesRowShape(16, 2)).isfinite().any())


def test_what_does_not_divide_is_left_to_the_other_kernel() -> None:
    packed = pack(plain_weight(96, 512, offsets=False), torch.bfloat16)
    assert fits(packed, CodesRowShape(16, 4)) and not fits(packed, CodesRowShape(16, 8))  # four runs of 128
    assert fits(packed, CodesRowShape(32, 4)) and not fits(packed, CodesRowShape(32, 4), gated=True)
    assert not fits(pack(weight_of(64, 256, 32, False), torch.bfloat16), CodesRowShape(16, 4))


def test_parts_of_tiles_are_for_what_can_be_added_up() -> None:
    packed, scratch = pack(plain_weight(96, 512, offsets=False), torch.bfloat16), PrefetchScratch.allocate("cpu", 192)
    halves = CodesRowShape(16, 2, 1, 1, 0, 0, 2)
    assert fits(packed, halves, scratch=scratch) and not fits(packed, halves)  # no scratch
    assert not fits(packed, halves, normed=True, scratch=scratch) and not fits(packed, halves, True, scratch=scratch)
    assert not fits(packed, CodesRowShape(16, 2, 1, 1, 0, 0, 3), scratch=scratch)  # two turns
    assert not fits(packed, CodesRowShape(16, 2, 2, 1, 0, 0, 2), scratch=scratch)  # two steps
    assert not fits(packed, CodesRowShape(16, 1, 1, 1, 0, 0, 4), scratch=scratch)  # the scratch is too small
    assert not fits(packed, CodesRowShape(16, 1, 1, 1, 0, 0, 0), scratch=scratch)
    wide = pack(weight_of(64, 1536, 512, False), torch.bfloat16)
    assert not fits(wide, CodesRowShape(16, 1, 1, 1, 0, 0, 2), scratch=scratch)  # a turn is half of a group


def choices(monkeypatch: pytest.MonkeyPatch, **kernels: tuple[str, tuple[int, ...]]) -> list[str]:
    """A table that names these kernels by form at one row, and the ring for more; and what was launched of both."""
    launched: list[str] = []

    def lookup(rows: int, features: int, width: int, dtype: torch.dtype, form: str) -> GemmChoice:
        found = kernels.get(form.removeprefix("int4 ")) if rows == 1 else None
        return GemmChoice(*(found or ("codes", (2, 1, 1))))

    def noted(name: str, call: Any) -> Any:
        return lambda *given, **named: launched.append(name) or call(*given, **named)

    def ring(x: Tensor, packed: PackedCodes, bias: Any, residual: Any, **_: Any) -> Tensor:
        return (x.float() @ unpacked(packed).float().t() + (0 if residual is None else residual.float())).to(x.dtype)

    monkeypatch.setattr(device_formats, "_SMALL", 0)
    monkeypatch.setattr(linear_prefetch, "available", lambda _: True)
    monkeypatch.setattr(linear_codes, "multiprocessors", lambda _: 4)
    monkeypatch.setattr(gemm_table, "lookup", lookup)
    monkeypatch.setattr(codes_row, "linear_codes_row", noted("row", linear_codes_row))
    monkeypatch.setattr(linear_codes, "linear_codes", noted("ring", ring))
    return launched


@pytest.mark.parametrize("apart", [False, True])
def test_operations_run_the_kernel_that_the_table_names(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    named = ("norm_then_codes_row" if apart else "codes_row", (16, 4, 1, 2))
    plain = (16, 2, 1, 1, 0, 0, 2) if apart else (16, 4, 1, 2)  # in two parts, or whole
    launched = choices(monkeypatch, plain=("codes_row", plain), norm=named, gated=named)
    ops, weight = TritonOps("cpu", torch.bfloat16), plain_weight(96, 512, offsets=True)
    packed, floats = ops.pack_quantized([weight]), unpacked(pack(weight, torch.bfloat16)).float()
    x, residual, gain = row(512), row(96, 1), torch.rand(512) + 0.5
    normed = rms_norm_reference(x.float(), gain, 1e-6) @ floats.t()
    with interpreting(reversed_range, None, ("weight", "scales", "gain"), ASSEMBLY):
        got = [ops.linear(x, packed, residual), ops.norm_linear(x, gain, 1e-6, packed),
               ops.norm_linear(x, gain, 1e-6, packed, "silu")]  # fmt: skip
    for found, want in zip(got, (x.float() @ floats.t() + residual.float(), normed, act_mul_reference(normed, "silu"))):
        torch.testing.assert_close(found.float(), want, rtol=0.03, atol=0.03 * float(want.abs().mean()))
    assert launched == ["row"] * 3
    assert ops.linear(row(1024).view(2, 512), packed).shape == (2, 96) and launched[3:] == ["ring"]


def test_the_ring_runs_what_the_table_or_the_shape_leaves_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    wide, parts = ("codes_row", (16, 8, 1, 2)), ("codes_row", (16, 2, 1, 1, 0, 0, 2))
    launched = choices(monkeypatch, plain=wide, gated=parts)
    ops, weight, gain = TritonOps("cpu", torch.bfloat16), plain_weight(96, 512, offsets=False), torch.ones(512)
    packed = ops.pack_quantized([weight])
    ops.linear(row(512), packed)  # eight warps do not share 512 columns
    ops.norm_linear(row(512), gain, 1e-6, packed, "silu")  # a part of the columns has no norm
    ops.norm_linear(row(512), gain, 1e-6, packed)  # the table has no form with a norm
    assert launched == ["ring"] * 3
    ops = TritonOps("cpu", torch.bfloat16, deterministic=True)
    packed = ops.pack_quantized([weight])
    ops.linear(row(512), packed)
    assert launched == ["ring"] * 3
