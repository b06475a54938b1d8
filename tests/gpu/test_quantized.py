"""Kernels of quantized weights compiled, on a real GPU: every one against the floats that its weight stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from quire.bench.gpu import tile_shapes
from quire.bench.gpu.tune import captured

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.quantized import CodedWeight, Fp8Weight, Mxfp4Weight, QuantizedWeight, WeightUse
    from quire.kernels.routing import Clamp, RoutedRows, RouterSpec
    from quire.kernels.triton import (
        activation,
        coded_rows,
        codes_row,
        codes_tiles,
        expert_codes,
        expert_linear,
        linear_bytes,
        linear_codes,
        linear_planes,
        linear_prefetch,
        norm,
        route,
    )
    from quire.ops.device_weights import to_codes, to_fp8, to_int8
    from quire.ops.triton import TritonOps

ROWS = (1, 2, 8, 16, 48, 64, 128, 300)
SHAPES = ((6144, 4096), (4096, 12288), (2048, 1024), (1152, 640))


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def close(got: torch.Tensor, want: torch.Tensor, most: float, what: object) -> None:
    assert (got.float() - want.float()).norm() <= most * want.float().norm(), what


@pytest.mark.parametrize(("features", "width"), SHAPES)
def test_gemms_of_fp8_weights_for_every_number_of_rows(features: int, width: int) -> None:
    weight = to_fp8(numbers(features, width))
    floats = weight.dequantized()
    for deterministic in (False, True):
        ops = TritonOps("cuda", torch.bfloat16, deterministic=deterministic, pdl=True)
        packed = ops.pack_quantized([weight])
        for rows in ROWS:
            x, residual = numbers(rows, width), numbers(rows, features)
            want = x.float() @ floats.t() + residual.float()
            close(ops.linear(x, packed, residual), want, 0.05, (rows, deterministic))
        ops.close()


@pytest.mark.parametrize(("features", "width", "group"), [(*SHAPES[0], 128), (*SHAPES[2], 64), (*SHAPES[3], 32)])
def test_gemms_of_4_bit_weights_for_every_number_of_rows(features: int, width: int, group: int) -> None:
    weight = to_codes(numbers(features, width), group, True)
    floats = weight.dequantized()
    for deterministic in (False, True):
        ops = TritonOps("cuda", torch.bfloat16, deterministic=deterministic, pdl=True)
        packed = ops.pack_quantized([weight])
        for rows in ROWS:
            x, residual = numbers(rows, width), numbers(rows, features)
            want = x.float() @ floats.t() + residual.float()
            close(ops.linear(x, packed, residual), want, 0.01, (rows, deterministic))
        ops.close()


def coded(features: int, width: int, bits: int, zero: int, group: int, offsets: bool) -> QuantizedWeight:
    codes = torch.randint(0, 1 << bits, (features, width), dtype=torch.uint8, device="cuda")
    scales = torch.rand(features, width // group, device="cuda").half().float()
    return QuantizedWeight(codes, scales, -scales if offsets else None, zero, bits, group)


WIDE = {"Q8_0": (8, 128, 32, False), "Q5_K": (5, 0, 32, True), "Q6_K": (6, 32, 16, False),
        "GPTQ of 8 bits": (8, 0, 128, True)}  # fmt: skip


@pytest.mark.parametrize("form", WIDE)
def test_gemms_of_wider_codes_for_every_number_of_rows(form: str) -> None:
    """Of one shape, since every shape is compiled anew."""
    features, width = 1152, 640
    weight = coded(features, width, *WIDE[form])
    floats = weight.dequantized()
    for deterministic in (False, True):
        ops = TritonOps("cuda", torch.bfloat16, deterministic=deterministic, pdl=True)
        linear = ops.pack_quantized([weight])
        assert torch.equal(linear_planes.unpacked(linear.packed), floats)
        for rows in (1, 7, 48, 64, 300):
            x, residual = numbers(rows, width), numbers(rows, features)
            want = x.float() @ floats.t() + residual.float()
            close(ops.linear(x, linear, residual), want, 0.01, (rows, deterministic))
        ops.close()


def test_gemms_of_int8_for_every_number_of_rows() -> None:
    features, width = 1152, 640
    weight = to_int8(numbers(features, width))
    for deterministic in (False, True):
        ops = TritonOps("cuda", torch.bfloat16, deterministic=deterministic, pdl=True)
        packed = ops.pack_quantized([weight])
        for rows in ROWS:
            x, residual = numbers(rows, width), numbers(rows, features)
            want = x.float() @ weight.dequantized().t() + residual.float()
            close(ops.linear(x, packed, residual), want, 0.03, (rows, deterministic))
        ops.close()
    x = numbers(5, 4096)
    got, want = (make(x, dtype=torch.int8) for make in (coded_rows.quantize_rows, coded_rows.quantize_reference))
    assert (got.codes.int() - want.codes.int()).abs().max() <= 1


def test_columns_in_another_order_and_parts_of_different_formats() -> None:
    ops = TritonOps("cuda", torch.bfloat16, pdl=True)
    order = torch.randperm(1024, device="cuda")
    weights = [replace(to_codes(numbers(512, 1024), 128, True), order=order), coded(256, 1024, *WIDE["Q6_K"])]
    packed, floats = ops.pack_quantized(weights), torch.cat([weight.dequantized() for weight in weights])
    for rows in (1, 8, 300):
        x = numbers(rows, 1024)
        close(ops.linear(x, packed), x.float() @ floats.t(), 0.01, rows)
    ops.close()


EXPERTS = ("MXFP4", "fp8", "fp8 in blocks", "int8", "int4", "Q6_K", "act-order")
"""Formats of experts that stay packed."""


def expert(form: str, features: int, width: int) -> CodedWeight:
    scale = width**-0.5
    if form == "MXFP4":
        scales = torch.randint(119, 123, (features, width // 32), dtype=torch.uint8, device="cuda")
        return Mxfp4Weight(torch.randint(0, 256, (features, width // 2), dtype=torch.uint8, device="cuda"), scales)
    if form == "fp8 in blocks":
        scales = (torch.rand(features, -(-width // 128), device="cuda") + 0.5) * scale
        return Fp8Weight(numbers(features, width).to(coded_rows.FP8), scales, 128)
    if form == "Q6_K":
        weight = coded(features, width, *WIDE["Q6_K"])
        return replace(weight, scales=(weight.scales / 16 * scale).half().float())
    floats = numbers(features, width) * scale
    if form in ("fp8", "int8"):
        return to_fp8(floats) if form == "fp8" else to_int8(floats)
    weight = to_codes(floats, 32, True)
    generator = torch.Generator("cuda").manual_seed(1)
    order = torch.randperm(width, device="cuda", generator=generator) if form == "act-order" else None
    return replace(weight, order=order)


@pytest.mark.parametrize("form", EXPERTS)
def test_experts_that_stay_packed_for_every_number_of_rows(form: str) -> None:
    """Widths that are no whole blocks where the format allows it, an expert that nobody chooses, biases, a clamp."""
    hidden, inner, experts = (512, 256, 8) if form == "Q6_K" else (480, 352, 8)
    clamp, spec = Clamp(7.0, 1.702), RouterSpec(experts, 2)
    ups = [[expert(form, inner, hidden) for _ in range(2)] for _ in range(experts)]
    downs = [expert(form, hidden, inner) for _ in range(experts)]
    biases = numbers(experts, 2 * inner), numbers(experts, hidden)
    wide = torch.stack([torch.cat([part.dequantized() for part in both]) for both in ups]), torch.stack(
        [weight.dequantized() for weight in downs])  # fmt: skip
    for deterministic in (False, True):
        ops = TritonOps("cuda", torch.bfloat16, deterministic=deterministic, pdl=True)
        pack = partial(ops.pack_quantized, slices=None, use=WeightUse.EXPERT)
        up = ops.group_linears([pack(both, biases[0][index]) for index, both in enumerate(ups)])
        down = ops.group_linears([pack([weight], biases[1][index]) for index, weight in enumerate(downs)])
        assert isinstance(up.weight, expert_codes.CodedExperts) and isinstance(down.weight, expert_codes.CodedExperts)
        x, residual, logits = numbers(300, hidden), numbers(300, hidden), torch.randn(300, experts, device="cuda")
        logits[:, -1] = -100.0
        chosen, gains = route.choose(RoutedRows(spec, logits, None, None, None))
        want = residual.float() + expert_linear.experts_reference(
            x.float(), wide[0], biases[0], wide[1], biases[1], chosen, gains, "silu", clamp)  # fmt: skip
        whole: torch.Tensor | None = None
        for rows in (300, 90, 40, 16, 3, 1):
            routed = RoutedRows(spec, logits[:rows].contiguous(), None, None, None)
            got = ops.routed_experts(x[:rows].contiguous(), routed, up, down, "silu", clamp, residual[:rows].clone())
            close(got, want[:rows], 0.02, (rows, deterministic))
            whole = got if whole is None else whole
            assert not deterministic or torch.equal(got, whole[:rows])
        ops.close()


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 128])
def test_the_kernel_of_codes_itself(rows: int) -> None:
    """Shares that cut tiles, and a program for each tile."""
    if not linear_prefetch.available(torch.device("cuda")):
        pytest.skip("needs Hopper and Triton 3.6")
    scratch = linear_prefetch.PrefetchScratch.allocate("cuda")
    for features, width, group in ((6144, 4096, 128), (1100, 1024, 32)):
        packed = linear_codes.pack(to_codes(numbers(features, width), group, True), torch.bfloat16)
        x, want = numbers(rows, width), linear_codes.unpacked(packed)
        for sizes in ((4, 2, 1), (4, 2, 0), (6, 1, 1)):
            shape = linear_codes.CodesShape(*sizes)
            if linear_codes.fits(rows, packed, shape, scratch):
                got = linear_codes.linear_codes(x, packed, sizes=shape, scratch=scratch, pdl=True)
                close(got, x.float() @ want.float().t(), 0.005, (sizes, features))


@pytest.mark.parametrize("tile", tile_shapes.TILES)
def test_the_kernel_of_codes_in_tiles_itself(tile: tuple[int, ...]) -> None:
    """Whole tiles, parts of tiles and equal shares; tiles of rows and features that are not full; and twice the same,
    so that what counts parts is as it was. Few kernels: one with bias and residual, one with two scales of a turn."""
    if not linear_prefetch.available(torch.device("cuda")):
        pytest.skip("needs Hopper and Triton 3.6")
    scratch = linear_prefetch.PrefetchScratch.allocate("cuda")
    for features, width, group in ((6144, 4096, 128), (1100, 1024, 64)):
        packed = linear_codes.pack(to_codes(numbers(features, width), group, True), torch.bfloat16)
        floats = linear_codes.unpacked(packed).float()
        for rows in (17, 64, 200, 256):
            x, residual, bias = numbers(rows, width), numbers(rows, features), numbers(1, features)[0]
            more = (bias, residual) if group == 128 else ()
            want = x.float() @ floats.t() + sum(each.float() for each in more)
            for parts in (1, 2, 3, 0):
                sizes = codes_tiles.CodesTilesShape(*tile, parts)
                assert codes_tiles.fits(rows, packed, sizes, scratch), sizes
                run = partial(codes_tiles.linear_codes_tiles, sizes=sizes, scratch=scratch, pdl=True)
                got = run(x, packed, *more)
                close(got, want, 0.005, (rows, parts, features))
                assert torch.equal(got, run(x, packed, *more))
    assert not scratch.arrived.any()


@pytest.mark.parametrize("form", ["plain", "norm", "gated"])
@pytest.mark.parametrize("offsets", [False, True])
def test_the_kernel_of_one_row_of_codes_itself(form: str, offsets: bool) -> None:
    """Features and columns to a warp, steps that not every program has, and runs of 64, 128 and 256 columns."""
    if not linear_prefetch.available(torch.device("cuda")):
        pytest.skip("needs Hopper and Triton 3.6")
    gated = "silu" if form == "gated" else None
    for features, width, group, *shapes in (
        (6144, 4096, 128, (16, 8, 1, 4, 3), (32, 8, 2, 1)), (1120, 1024, 64, (16, 4, 3, 2), (16, 16, 1, 8)),
        (224, 6144, 512, (16, 8, 2, 4)),
        (512, 17408, 128, (32, 8, 1, 3, 2, 6), (16, 16, 1, 2, 0)),  # 136 runs to 8 or 16 warps
    ):  # fmt: skip
        packed = linear_codes.pack(to_codes(numbers(features, width), group, offsets), torch.bfloat16)
        x, floats = numbers(1, width), linear_codes.unpacked(packed).float()
        gain, bias = torch.rand(width, device="cuda") + 0.5, numbers(features)
        rows = norm.rms_norm_reference(x.float(), gain, 1e-6) if form != "plain" else x.float()
        want = rows @ floats.t() + bias.float()
        want = activation.act_mul_reference(want, "silu") if gated else want
        residual = numbers(1, features) if form == "plain" else None
        want = want if residual is None else want + residual.float()
        for sizes in shapes:
            shape = codes_row.CodesRowShape(*sizes)
            assert codes_row.fits(packed, shape, gated is not None)
            got = codes_row.linear_codes_row(x, packed, bias, residual, norm=None if form == "plain" else gain,
                                             eps=1e-6, gated=gated, sizes=shape, pdl=True)
            close(got, want, 0.01, (sizes, features, form))


@pytest.mark.parametrize("offsets", [False, True])
def test_parts_of_one_row_of_codes_add_up_again_and_again(offsets: bool) -> None:
    """Equal and unequal parts, whole and part turns, with kernels before and behind that begin early and share the
    scratch: launched, then as a graph that is replayed. All bits are the same each time, and no part is left over."""
    if not linear_prefetch.available(torch.device("cuda")):
        pytest.skip("needs Hopper and Triton 3.6")
    scratch = linear_prefetch.PrefetchScratch.allocate("cuda")
    for features, width, group, *shapes in (
        (5120, 17408, 128, (32, 4, 1, 2, 5, 0, 4), (64, 8, 1, 1, 2, 0, 3), (16, 4, 1, 4, 5, 2, 2)),
        (4096, 12288, 128, (32, 8, 1, 3, 2, 0, 2), (64, 4, 1, 1, 4, 0, 8)),
        (1120, 4736, 128, (32, 4, 1, 1, 0, 1, 3), (16, 8, 1, 2, 0, 0, 5)),  # 37 runs
        (224, 6144, 512, (16, 8, 1, 4, 0, 0, 3)),
    ):  # fmt: skip
        packed = linear_codes.pack(to_codes(numbers(features, width), group, offsets), torch.bfloat16)
        x, floats = numbers(1, width), linear_codes.unpacked(packed).float()
        bias, residual = numbers(features), numbers(1, features)
        want = x.float() @ floats.t() + bias.float() + residual.float()
        for sizes in shapes:
            shape = codes_row.CodesRowShape(*sizes)
            assert codes_row.fits(packed, shape, scratch=scratch)
            run = partial(codes_row.linear_codes_row, x, packed, bias, residual, sizes=shape, scratch=scratch, pdl=True)
            first = run()
            close(first, want, 0.01, (sizes, features))
            outs = [torch.empty_like(first) for _ in range(8)]
            graph = captured([partial(run, out=out) for out in outs])
            for _ in range(5):
                for out in outs:
                    out.zero_()
                graph.replay()
                assert all(torch.equal(out, first) for out in outs), (sizes, features)
    assert not scratch.arrived.any()


@pytest.mark.parametrize("form", ["plain", "norm", "gated"])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_kernel_of_one_row_of_fp8_itself(form: str, blocks: bool) -> None:
    """Steps that not every program has, runs of 64 and of 128 columns, shares that are uneven, and both types."""
    if not linear_prefetch.available(torch.device("cuda")):
        pytest.skip("needs Hopper and Triton 3.6")
    gated = "silu" if form == "gated" else None
    for features, width, *shapes in (
        (6144, 4096, (16, 8, 3, 5, 2, 7), (32, 8, 1, 2, 2, 2)), (1120, 1344, (16, 4, 3, 2)),
        (512, 17408, (16, 16, 1, 2, 0)),
    ):  # fmt: skip
        if width % 128 and blocks:
            continue
        weight = numbers(features, width).to(coded_rows.FP8)
        scales = torch.rand(features, width // 128, device="cuda")[:, : None if blocks else 1] / 8
        floats = weight.float() * scales.repeat_interleave(128 if blocks else width, 1)
        scales = scales.contiguous() if blocks else scales[:, 0].contiguous()
        gain, bias = torch.rand(width, device="cuda") + 0.5, numbers(features)
        for dtype in (torch.bfloat16, torch.float16)[: 2 if width == 1344 else 1]:
            x = numbers(1, width).to(dtype)
            rows = norm.rms_norm_reference(x.float(), gain, 1e-6) if form != "plain" else x.float()
            want = rows @ floats.t() + bias.float()
            want = activation.act_mul_reference(want, "silu") if gated else want
            residual = numbers(1, features).to(dtype) if form == "plain" else None
            want = want if residual is None else want + residual.float()
            for sizes in shapes:
                shape = codes_row.CodesRowShape(*sizes)
                assert codes_row.fits_bytes(weight, scales, shape, gated is not None)
                got = codes_row.linear_bytes_row(
                    x, weight, scales, bias.to(dtype), residual, norm=None if form == "plain" else gain, eps=1e-6,
                    gated=gated, sizes=shape, pdl=True)  # fmt: skip
                close(got, want, 0.005, (sizes, features, form, dtype))


def test_blocks_of_128_and_rows_are_exact() -> None:
    x = coded_rows.quantize_rows(numbers(200, 1024))
    weight = numbers(640, 1024).to(coded_rows.FP8)
    scales = torch.rand(640, 8, device="cuda") + 0.5
    out = torch.empty(200, 640, device="cuda", dtype=torch.bfloat16)
    got = linear_bytes.linear_bytes(x.codes, weight, (scales, x.scales), out=out)
    want = linear_bytes.linear_reference(x.codes, weight, (scales, x.scales), None, None, torch.float32)
    close(got, want, 0.01, "blocks")


@pytest.mark.parametrize("gated", [None, "silu"])
def test_rows_and_norms_in_fp8_are_their_references(gated: str | None) -> None:
    x = numbers(5, 8192 if gated else 4096)
    got, want = coded_rows.quantize_rows(x, gated=gated, pdl=True), coded_rows.quantize_reference(x, gated=gated)
    assert torch.allclose(got.scales, want.scales, rtol=1e-2)
    close(got.codes.float() * got.scales[:, None], want.codes.float() * want.scales[:, None], 0.04, gated)
    gain = torch.rand(4096, device="cuda")
    sums = [numbers(5, 4096)] * 2
    normed = coded_rows.norm_rows(x[:, :4096].contiguous(), sums[0].clone(), gain, 1e-6, pdl=True)
    reference = coded_rows.norm_reference(x[:, :4096].contiguous(), sums[1].clone(), gain, 1e-6)
    floats = [rows.codes.float() * rows.scales[:, None] for rows in (normed, reference)]
    close(floats[0], floats[1], 0.04, "norm")


@pytest.mark.parametrize("quantization", ["fp8", "int4", "int8"])
def test_an_engine_with_weights_rounded_at_load_answers_the_same_with_and_without_graphs(
    quantization: str, tmp_path: Path
) -> None:
    from quire import LLM, SamplingParams
    from tests.worker.gpu.engines import QWEN3

    config = {**QWEN3, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[(7 * i + 3 * j) % 131 for j in range(n)] for i, n in enumerate((3, 40, 90, 17))]
    answers = []
    for more in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 32}):
        llm = LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cuda", max_model_len=160,
                  quantization=quantization, deterministic=True, num_kv_blocks=64, **more)
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        llm.close()
    assert answers[0] == answers[1] == answers[2]
    assert all(len(answer) == 12 for answer in answers[0])
