"""Quantized weights in the GPU's operations, run by the interpreter: each format against the floats it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.errors import UnsupportedModelError
from quire.kernels.quantized import Fp8Weight, QuantizedWeight, Rounding, WeightUse
from quire.kernels.slices import Slices, finish_tree
from quire.kernels.triton.coded_rows import FP8, CodedRows
from quire.models.build import build_decoder
from quire.ops.device_weights import BytesLinear, CodesLinear, SplitLinear, to_int8
from quire.ops.triton import TritonOps
from tests.checkpoints import config_of, make_model, weights_of
from tests.paged_driver import PagedDriver

BF16 = torch.bfloat16
FP8_AT_LOAD, INT4_AT_LOAD, INT8_AT_LOAD = Rounding(None, fp8=True), Rounding(4, 64, True), Rounding(8, 0)
FEATURES, WIDTH = 96, 128


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(BF16)


def close(got: Tensor, want: Tensor, most: float) -> None:
    assert (got.double() - want.double()).norm() <= most * want.double().norm()


def codes(offsets: bool = True, group: int = 64) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(0, 16, (FEATURES, WIDTH), dtype=torch.uint8, generator=generator)
    scales = torch.rand(FEATURES, WIDTH // group, generator=generator)
    return QuantizedWeight(drawn, scales, -8 * scales if offsets else None, 0 if offsets else 8, 4, group)


def blocks(input_scale: float | None = None) -> Fp8Weight:
    scales = torch.rand(FEATURES, 1, generator=torch.Generator().manual_seed(8)) + 0.5
    return Fp8Weight(numbers(FEATURES, WIDTH, seed=7).to(FP8), scales, WIDTH, input_scale)


def wide(bits: int, zero: int, group: int) -> QuantizedWeight:
    """Scales of half precision, as files have them."""
    generator = torch.Generator().manual_seed(bits)
    drawn = torch.randint(0, 1 << bits, (FEATURES, WIDTH), dtype=torch.uint8, generator=generator)
    return QuantizedWeight(drawn, torch.rand(FEATURES, WIDTH // group).half().float(), None, zero, bits, group)


def ordered(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, order=torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2)))


WEIGHTS = {
    "fp8": (blocks(), 0.05), "fp8 with a fixed scale of inputs": (blocks(0.01), 0.05),
    "fp8 in blocks": (Fp8Weight(numbers(FEATURES, WIDTH).to(FP8), torch.rand(FEATURES, 1) + 0.5, 128), 0.05),
    "int4 with offsets": (codes(), 0.01), "int4": (codes(False, 32), 0.01),
    "int8": (to_int8(numbers(FEATURES, WIDTH)), 0.02), "8 bits in groups": (wide(8, 128, 32), 0.01),
    "5 bits": (wide(5, 16, 32), 0.01), "6 bits": (wide(6, 32, 16), 0.01),
    "act-order": (ordered(codes()), 0.01), "act-order of 8 bits": (ordered(wide(8, 128, 32)), 0.01),
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_gemm_is_that_of_the_floats_the_weight_stands_for(kind: str, deterministic: bool) -> None:
    weight, most = WEIGHTS[kind]
    ops = TritonOps("cpu", BF16, deterministic=deterministic)
    kept = ops.quantized(weight)
    assert kept is weight
    bias, floats = numbers(2 * FEATURES, seed=3), weight.dequantized()
    packed = ops.pack_quantized([weight, weight], bias)
    assert packed.out_features == 2 * FEATURES and packed.in_features == WIDTH
    for rows in (1, 3):
        x, residual = numbers(rows, WIDTH, seed=rows), numbers(rows, 2 * FEATURES, seed=rows + 5)
        want = x.double() @ torch.cat([floats, floats]).double().t() + bias.double() + residual.double()
        close(ops.linear(x, packed, residual), want, most)


def test_rows_do_not_depend_on_each_other_in_deterministic_mode() -> None:
    ops = TritonOps("cpu", BF16, deterministic=True)
    for kind in ("fp8", "fp8 in blocks", "int4", "int8", "6 bits"):
        packed = ops.pack_quantized([WEIGHTS[kind][0]])
        x = numbers(70, WIDTH)
        whole = ops.linear(x, packed)
        assert torch.equal(ops.linear(x[3:4].contiguous(), packed), whole[3:4])
        assert torch.equal(ops.linear(x[:65].contiguous(), packed), whole[:65])


def test_norm_and_gate_hand_rows_in_fp8_to_a_reader_that_multiplies_fp8() -> None:
    ops = TritonOps("cpu", BF16)
    fp8, plain = ops.pack_quantized([blocks()]), ops.pack_linear(numbers(FEATURES, WIDTH))
    gain = torch.ones(WIDTH)
    x, gate_up = numbers(3, WIDTH), numbers(3, 2 * WIDTH)
    for reader, kind in ((fp8, CodedRows), (plain, Tensor), (None, Tensor)):
        normed = ops.add_rms_norm(x, numbers(3, WIDTH, seed=2), gain, 1e-6, reader)
        assert isinstance(normed, kind) and isinstance(ops.gate(gate_up, "silu", reader), kind)
    want = ops.linear(ops.add_rms_norm(x, numbers(3, WIDTH, seed=2), gain, 1e-6), fp8)
    close(ops.linear(ops.add_rms_norm(x, numbers(3, WIDTH, seed=2), gain, 1e-6, fp8), fp8), want, 1e-3)


@pytest.mark.parametrize(("rounding", "kind"), [
    (FP8_AT_LOAD, BytesLinear), (INT4_AT_LOAD, CodesLinear), (INT8_AT_LOAD, BytesLinear),
    (Rounding(8, 64), CodesLinear),
])
def test_weights_are_rounded_at_load_but_for_heads_and_routers(rounding: Rounding, kind: type) -> None:
    ops = TritonOps("cpu", BF16, rounding=rounding)
    floats = numbers(FEATURES, WIDTH)
    rounded = ops.quantized(floats)
    assert rounded is not None
    assert isinstance(ops.pack_quantized([rounded]), kind)
    close(rounded.dequantized(), floats, 0.12)
    for use in (WeightUse.VOCABULARY, WeightUse.EXACT):
        assert ops.quantized(floats, use=use) is None
    assert TritonOps("cpu", torch.float32, rounding=rounding).quantized(floats) is None
    assert TritonOps("cpu", BF16).quantized(floats) is None


def test_parts_of_different_formats_are_multiplied_one_by_one_and_neighbours_of_one_format_together() -> None:
    ops = TritonOps("cpu", BF16)
    parts = [codes(group=32), codes(group=32), wide(6, 32, 16), ordered(codes()), ordered(codes())]
    bias, x = numbers(5 * FEATURES), numbers(3, WIDTH)
    packed = ops.pack_quantized(parts, bias)
    assert isinstance(packed, SplitLinear) and [part.out_features for part in packed.parts] == [192, 96, 192]
    floats = torch.cat([part.dequantized() for part in parts])
    residual = numbers(3, 5 * FEATURES, seed=4)
    close(ops.linear(x, packed, residual.clone()), x.float() @ floats.t() + bias.float() + residual.float(), 0.01)


@pytest.mark.parametrize(
    ("rounding", "kind", "most"),
    [(FP8_AT_LOAD, BytesLinear, 0.1), (INT4_AT_LOAD, CodesLinear, 0.3), (INT8_AT_LOAD, BytesLinear, 0.1)],
)
def test_a_decoder_with_rounded_weights_is_near_the_one_without(rounding: Rounding, kind: type, most: float) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = make_model("qwen3", **sizes)
    logits = []
    for each in (None, rounding):
        decoder = build_decoder(config_of(model), weights_of(model), TritonOps("cpu", BF16, rounding=each), dtype=BF16)
        logits.append(PagedDriver(decoder).run(0, [5, 3, 96, 41], [3, 1]))
    assert isinstance(decoder.layers[0].mlp.down.packed, kind)
    close(logits[1], logits[0], most)


@pytest.mark.parametrize("weight", [codes(), wide(6, 32, 16)], ids=["4 bits", "6 bits"])
def test_ranks_that_share_codes_get_the_bits_of_one_rank_in_deterministic_mode(weight: QuantizedWeight) -> None:
    ops, slices, x = TritonOps("cpu", BF16, deterministic=True), Slices.each(2, 64), numbers(3, WIDTH)
    assert ops.quantized(weight, slices) is weight
    values: dict[tuple[int, int], Tensor] = {}
    for rank in range(2):
        part, run = slices.part(rank, rank + 1), slice(64 * rank, 64 * rank + 64)
        packed = ops.pack_quantized([weight.columns(run.start, run.stop)], None, part)
        nodes = ops.linear_nodes(x[:, run].contiguous(), packed)
        values.update(zip(part.nodes(), nodes, strict=True))
    whole = ops.linear(x, ops.pack_quantized([weight], None, slices))
    found = finish_tree(slices.total, values)
    # Interpreted, a kernel that stores bf16 cuts off what does not fit.
    assert torch.equal((found.view(torch.int32) & -65536).view(torch.float32), whole.float())
    assert ops.quantized(codes(False, 32), Slices.of_width(WIDTH)) is None  # a slice would cut what lies together
    with pytest.raises(UnsupportedModelError, match="deterministic"):
        ops.quantized(blocks(), slices.part(0, 1))
