"""Experts that stay packed, in the GPU's operations run by the interpreter: every format against the floats it stands
for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.cli.gpu_bytes import made_expert_bytes, stored_expert_bytes
from quire.kernels.quantized import CodedWeight, Fp8Weight, Mxfp4Weight, QuantizedWeight, Rounding, WeightUse
from quire.kernels.routing import Clamp, RoutedRows, RouterSpec
from quire.kernels.triton import code_planes, expert_codes, expert_codes_few, route
from quire.kernels.triton.expert_codes import CodedExperts
from quire.kernels.triton.expert_linear import experts_reference, sum_pairs
from quire.models.build import build_decoder
from quire.models.loader.source import resolve_model
from quire.models.loader.stored_forms import StoredForm
from quire.ops.device_weights import DeviceGroup, ExpertLinear
from quire.ops.triton import TritonOps
from tests.checkpoints import config_of, make_model, weights_of
from tests.mxfp4_checkpoints import write_mxfp4
from tests.paged_driver import PagedDriver

BF16, EXPERT = torch.bfloat16, WeightUse.EXPERT
EXPERTS, TOP_K = 5, 2


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(BF16)


def drawn(*size: int, most: int, seed: int) -> Tensor:
    return torch.randint(0, most, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def integers(bits: int, zero: int, group: int, offsets: bool, ordered: bool = False):  # type: ignore[no-untyped-def]
    def make(features: int, width: int, seed: int) -> QuantizedWeight:
        own = width if group == 0 else group
        generator = torch.Generator().manual_seed(seed)
        scales = (torch.rand(features, width // own, generator=generator) / (width**0.5 * 2**bits / 4)).half().float()
        order = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if ordered else None
        codes = drawn(features, width, most=1 << bits, seed=seed)
        added = (-(1 << bits - 1) * scales).half().float() if offsets else None
        return QuantizedWeight(codes, scales, added, zero, bits, own, order)

    return make


def mxfp4(features: int, width: int, seed: int) -> Mxfp4Weight:
    scales = drawn(features, width // 32, most=6, seed=seed + 1) + 121
    return Mxfp4Weight(drawn(features, width // 2, most=256, seed=seed), scales)


def fp8(block: int | None):  # type: ignore[no-untyped-def]
    def make(features: int, width: int, seed: int) -> Fp8Weight:
        codes = numbers(features, width, seed=seed).to(torch.float8_e4m3fn)
        count = 1 if block is None else -(-width // block)
        scales = (torch.rand(features, count, generator=torch.Generator().manual_seed(seed)) + 0.5) / width**0.5
        return Fp8Weight(codes, scales, block or width)

    return make


FORMATS = {
    "MXFP4": (mxfp4, 96), "fp8": (fp8(None), 44), "fp8 in blocks": (fp8(128), 136),
    "int8": (integers(8, 128, 0, False), 96), "Q8_0": (integers(8, 128, 32, False), 96),
    "GPTQ of 8 bits": (integers(8, 0, 128, True), 128), "Q4_0": (integers(4, 8, 32, False), 96),
    "AWQ": (integers(4, 0, 64, True), 64), "GPTQ in groups of 128": (integers(4, 8, 128, False), 128),
    "Q5_K": (integers(5, 0, 32, True), 96), "Q6_K": (integers(6, 32, 16, False), 48),
    "act-order": (integers(4, 0, 32, True, ordered=True), 96),
}  # fmt: skip
"""What makes a weight, and the width of its rows: not whole blocks where the format allows it."""


def coded_of(kind: str, features: int, seed: int, width: int | None = None) -> list[CodedWeight]:
    make, usual = FORMATS[kind]
    return [make(features, width or usual, seed + index) for index in range(EXPERTS)]


def grouped(ops: TritonOps, *parts: list[CodedWeight], bias: Tensor | None = None) -> DeviceGroup:
    kept = [[ops.quantized(weight, None, EXPERT) for weight in part] for part in parts]
    assert all(each is weight for some, part in zip(kept, parts, strict=True)
               for each, weight in zip(some, part, strict=True))  # fmt: skip
    packed = [ops.pack_quantized(list(both), None if bias is None else bias[index], None, EXPERT)
              for index, both in enumerate(zip(*parts, strict=True))]  # fmt: skip
    return ops.group_linears(packed)


def floats_of(*parts: list[CodedWeight]) -> Tensor:
    return torch.stack([torch.cat([part.dequantized() for part in both]) for both in zip(*parts, strict=True)])


def routed(tokens: int, seed: int = 3) -> RoutedRows:
    """The last expert is never chosen."""
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    logits[:, -1] = -100.0
    return RoutedRows(RouterSpec(EXPERTS, TOP_K), logits, None, None, None)


def reference(x: Tensor, up: Tensor, down: Tensor, rows: RoutedRows, clamp: Clamp | None = None,
              biases: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
    chosen, gains = route.choose(rows)
    return experts_reference(x.float(), up, biases[0], down, biases[1], chosen, gains, "silu", clamp)


def close(got: Tensor, want: Tensor, most: float = 0.02) -> None:
    # Interpreted, a kernel that stores bf16 cuts off what does not fit.
    assert (got.double() - want.double()).norm() <= most * want.double().norm()


@pytest.mark.parametrize("kind", FORMATS)
def test_experts_are_those_of_the_floats_their_codes_stand_for(kind: str) -> None:
    """One token and a few go through a kernel of their own, more through blocks."""
    ops, width = TritonOps("cpu", BF16), FORMATS[kind][1]
    inner = width
    gate, up, down = (coded_of(kind, size, seed, inner) for size, seed in ((inner, 0), (inner, 20), (24, 40)))
    groups = grouped(ops, gate, up), grouped(ops, down)
    assert all(isinstance(group.weight, CodedExperts) for group in groups)
    wide = floats_of(gate, up), floats_of(down)
    assert torch.allclose(groups[0].weight.floats(), wide[0].flatten(0, 1), rtol=2e-3, atol=1e-6)
    for tokens in (1, 20):
        x, rows = numbers(tokens, width, seed=tokens), routed(tokens)
        residual = numbers(tokens, 24, seed=7)
        got = ops.routed_experts(x, rows, *groups, "silu", None, residual)
        close(got, reference(x, *wide, rows) + residual.float())


@pytest.mark.parametrize("tokens", [3, 40])
def test_gpt_oss_has_biases_and_a_clamp_and_tiles_that_rows_and_features_do_not_fill(tokens: int) -> None:
    ops, clamp = TritonOps("cpu", BF16), Clamp(0.7, 1.702)
    gate, up, down = (coded_of("MXFP4", size, seed, 160) for size, seed in ((160, 0), (160, 20), (50, 40)))
    biases = numbers(EXPERTS, 320, seed=5), numbers(EXPERTS, 50, seed=6)
    groups = grouped(ops, gate, up, bias=biases[0]), grouped(ops, down, bias=biases[1])
    x, rows = numbers(tokens, 160), routed(tokens)
    got = ops.routed_experts(x, rows, *groups, "silu", clamp, None)
    close(got, reference(x, floats_of(gate, up), floats_of(down), rows, clamp, biases))


@pytest.mark.parametrize("kind", ["MXFP4", "fp8", "Q6_K", "AWQ"])
def test_rows_do_not_depend_on_each_other_in_deterministic_mode(kind: str) -> None:
    ops, width = TritonOps("cpu", BF16, deterministic=True), FORMATS[kind][1]
    gate, up, down = (coded_of(kind, size, seed, width) for size, seed in ((width, 0), (width, 20), (16, 40)))
    groups = grouped(ops, gate, up), grouped(ops, down)
    x, rows = numbers(40, width), routed(40)
    whole = ops.routed_experts(x, rows, *groups, "silu", None, None)
    for some in (slice(3, 4), slice(0, 17)):
        part = replace(rows, logits=rows.logits[some].contiguous())
        found = ops.routed_experts(x[some].contiguous(), part, *groups, "silu", None, None)
        assert torch.equal(found, whole[some])


@pytest.mark.parametrize("rows", [32, 64])
def test_blocks_of_other_sizes_and_padding(rows: int) -> None:
    """Rows of no expert (-1) change nobody else's, in blocks and in the kernel of few rows."""
    ops, width = TritonOps("cpu", BF16), 96
    gate, up, down = (coded_of("MXFP4", size, seed, width) for size, seed in ((width, 0), (width, 20), (24, 40)))
    first, second = grouped(ops, gate, up).weight, grouped(ops, down).weight
    x, (chosen, gains) = numbers(9, width), route.choose(routed(9))
    want = experts_reference(x.float(), floats_of(gate, up), None, floats_of(down), None, chosen, gains, "silu", None)
    chosen[2] = -1
    others = [token for token in range(9) if token != 2]
    sizes = expert_codes.CodedShape(rows, 32, 4, 1)
    blocks = route.block_experts(chosen, EXPERTS, rows)
    inner = expert_codes.up_coded_experts(x, first, None, chosen, blocks, "silu", None, sizes)
    found = expert_codes.down_coded_experts(inner, second, None, chosen, gains, blocks, sizes)
    close(sum_pairs(found, TOP_K)[others], want[others])
    shape = expert_codes_few.CodedFewShape(4, 64, 4)
    between = expert_codes_few.coded_few_up(x, first, None, chosen, "silu", None, sizes=shape)
    close(expert_codes_few.coded_few_down(between, second, None, chosen, gains, sizes=shape)[others], want[others])


@pytest.mark.parametrize(("rounding", "bits", "most"), [
    (Rounding(None, fp8=True), 8, 0.05), (Rounding(4, 128, True), 4, 0.15), (Rounding(8, 0), 8, 0.02),
    (Rounding(8, 32), 8, 0.02),
])
def test_experts_of_floats_are_rounded_at_load(rounding: Rounding, bits: int, most: float) -> None:
    """Groups are cut to what divides the width: 128 does not divide 96."""
    ops, floats = TritonOps("cpu", BF16, rounding=rounding), numbers(24, 96)
    kept = ops.quantized(floats, None, EXPERT)
    assert kept is not None
    packed = ops.pack_quantized([kept, kept], None, None, EXPERT)
    assert isinstance(packed, ExpertLinear) and packed.packed.bits == bits
    assert (packed.out_features, packed.in_features) == (48, 96) and packed.nbytes == packed.packed.nbytes
    close(packed.packed.floats(), torch.cat([floats, floats]), most)
    assert TritonOps("cpu", torch.float32, rounding=rounding).quantized(floats, None, EXPERT) is None
    assert TritonOps("cpu", BF16, rounding=Rounding(None)).quantized(floats, None, EXPERT) is None


def test_experts_of_formats_that_are_almost_one_become_one_and_others_floats() -> None:
    ops = TritonOps("cpu", BF16)
    zeros, minima, finer = integers(4, 8, 64, False), integers(4, 0, 64, True), integers(4, 0, 32, True)
    weights = [make(16, 64, seed) for seed, make in enumerate((zeros, minima, finer))]
    group = ops.group_linears([ops.pack_quantized([weight], None, None, EXPERT) for weight in weights])
    assert isinstance(group.weight, CodedExperts) and (group.weight.group, group.weight.zero) == (32, 0)
    assert torch.allclose(group.weight.floats(), torch.cat([weight.dequantized() for weight in weights]), rtol=1e-2,
                          atol=1e-5)
    mixed = [*weights[:1], integers(6, 32, 32, False)(16, 64, 9)]
    group = ops.group_linears([ops.pack_quantized([weight], None, None, EXPERT) for weight in mixed])
    assert isinstance(group.weight, Tensor) and group.weight.dtype == BF16
    close(group.weight, torch.stack([weight.dequantized() for weight in mixed]), 0.01)
    floats = ops.pack_quantized(mixed, None, None, EXPERT)  # gate and up of one expert
    close(floats.weight, torch.cat([weight.dequantized() for weight in mixed]), 0.01)


def test_packed_experts_take_the_bytes_of_their_codes() -> None:
    ops = TritonOps("cpu", BF16)
    group = grouped(ops, coded_of("MXFP4", 48, 0, 128))
    assert group.weight.nbytes == EXPERTS * 48 * 128 * 17 // 32
    assert sum(member.nbytes for member in group.members) == group.weight.nbytes


@pytest.mark.parametrize("width", [96, 128, 40])
def test_inspect_counts_what_packing_takes(width: int) -> None:
    forms = {"fp8": Rounding(None, fp8=True), "int8": Rounding(8, 0), "int4": Rounding(4, 128, True)}
    for form, rounding in forms.items():
        ops = TritonOps("cpu", BF16, rounding=rounding)
        kept = ops.quantized(numbers(24, width), None, EXPERT)
        taken = 2 * 24 * width if kept is None else ops.pack_quantized([kept], None, None, EXPERT).nbytes
        assert (kept is None) == (width == 40 and form != "fp8") and taken == made_expert_bytes(form, 24, width)
    if width % 32 == 0:
        packed = ops.pack_quantized([mxfp4(24, width, 0)], None, None, EXPERT)
        assert packed.nbytes == stored_expert_bytes(StoredForm("mxfp4", 4, 32), 24, width)


def test_numbers_of_small_floats_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    real = (codes & 127) != 127  # no number
    want = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(code_planes.numbers_in(codes, 0, code_planes.E4M3)[real], want[real])
    pairs = [16 * (low + 1) + low for low in range(0, 16, 2)] + [0] * 8
    few = Mxfp4Weight(torch.tensor([pairs], dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8))
    assert torch.equal(code_planes.numbers_in(codes[:16], 0, code_planes.E2M1), few.dequantized()[0, :16])


def logits_of(config: dict[str, Any], weights: Any, rounding: Rounding | None = None) -> tuple[Tensor, Any]:
    """Of a short prompt, and the decoder."""
    decoder = build_decoder(config, weights, TritonOps("cpu", BF16, rounding=rounding), dtype=BF16)
    return PagedDriver(decoder).run(0, [5, 3, 96, 41], [3, 1]), decoder


def test_an_mxfp4_checkpoint_stays_packed_and_is_the_model_with_those_weights(tmp_path: Path) -> None:
    """Rows of gate and up in turns, biases and the clamp of gpt-oss; bf16 holds MXFP4 exactly."""
    model = make_model("gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                       layer_types=["sliding_attention"])
    write_mxfp4(tmp_path, model)
    source = resolve_model(str(tmp_path))
    want, wide = logits_of(source.config, source.weights())
    got, packed = logits_of(source.config, source.stored_weights(), Rounding(None))
    groups = packed.layers[0].mlp._experts._up.group, packed.layers[0].mlp._experts._down.group
    assert all(group.weight.numbers == code_planes.E2M1 for group in groups)
    saved = sum(group.weight.experts * group.weight.features * group.weight.width for group in groups)
    assert wide.weight_bytes - packed.weight_bytes == saved * 2 - sum(group.weight.nbytes for group in groups)
    close(got, want, 0.02)


def test_a_decoder_with_rounded_experts_is_near_the_one_without() -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = make_model("qwen3_moe", **sizes)
    want, _ = logits_of(config_of(model), weights_of(model))
    got, decoder = logits_of(config_of(model), weights_of(model), Rounding(4, 32, True))
    assert isinstance(decoder.layers[0].mlp._experts._up.group.weight, CodedExperts)
    close(got, want, 0.3)
