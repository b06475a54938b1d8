"""Compiles the kernels that run on a GPU of one compute capability, without such a GPU, and prints the shared memory
that each needs as JSON; run as a script (`compile_for_chips.py 89`), not in pytest's own process.

Models of one layer with heads of real sizes run steps on tensors of the CPU, where every launch becomes a compilation:
so the kernels and their tiles are those that the engine chooses on that chip. Results are garbage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import compile_for_hopper
import torch

from quire.attention import triton as attention
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.routing import Clamp, RouterSpec
from quire.kernels.slices import Slices
from quire.kernels.triton import (
    activation,
    all_head_norm,
    attention_decode,
    attention_rope,
    attention_split,
    branch,
    chains,
    coded_rows,
    codes_few,
    distill,
    features,
    inputs,
    latent_attention,
    linear_bytes,
    linear_codes,
    linear_fixed,
    linear_planes,
    meeting,
    norm,
    spread,
    unpacked_pages,
    weights,
)
from quire.kernels.types import HeadShape, HeadTurn, LatentShape, LayerCache, pair_cache
from quire.models.build import build_decoder, dummy_weights
from quire.ops.device_experts import ExpertKernels
from quire.ops.triton import TritonOps
from tests.kernels.triton import cases
from tests.kernels.triton.hopper import compiling
from tests.paged_driver import PagedDriver

SHARED = {80: 163 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability."""
FP8 = 89
"""The first compute capability with fp8."""
HALF = torch.bfloat16
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 1024,
}  # fmt: skip
LARGE_HEADS = DENSE | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 256, "query_pre_attn_scalar": 256}
LATENTS = DENSE | {
    "architectures": ["DeepseekV3ForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "first_k_dense_replace": 0,
}  # fmt: skip


def steps(capability: int, config: dict[str, Any], prompt: int, deterministic: bool = False) -> None:
    """A prompt, then one token."""
    ops = TritonOps("cpu", HALF, deterministic=deterministic, pdl=capability >= 90)
    ops._copy_engine = capability >= 90
    ops.attention.shared_memory = SHARED[capability]
    driver = PagedDriver(build_decoder(config, dummy_weights(config), ops, dtype=HALF), num_blocks=40)
    with torch.inference_mode():
        driver.step({0: [5] * prompt})
        driver.step({0: [5]})


def decode(capability: int) -> None:
    """Decode attention with the rotation inside it and without, and over latents."""
    heads, early, shared = HeadShape(16, 8, 128), capability >= 90, SHARED[capability]
    ints, table = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    cache = cases.make_cache("cpu", HALF, heads, 4, 16)
    split = attention_split.DecodeSplit.allocate(4, 8, "cpu")
    attention_split.split_decode(split, ints, None)
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, 4, heads, "cpu")
    qkv = torch.empty(2, heads.width, dtype=HALF)
    given = qkv, cache, table, ints, ints, split, scratch, heads, 0.1
    turn = HeadTurn(torch.empty(64, 128), torch.empty(128), torch.empty(128), 1e-6)
    for sequences in (32, 1):
        sizes = attention_split.decode_shape(sequences, 128, 2, shared)
        options: dict[str, Any] = {"keys": sizes.keys, "num_warps": sizes.warps, "num_stages": sizes.stages,
                                   "carried": sizes.carried, "pdl": early}  # fmt: skip
        attention_decode.decode_attention(*given, halves=sizes.carried, **options)
        attention_rope.rope_decode_attention(*given, turn, prefetch=True, **options)
    if capability >= FP8:
        narrow = pair_cache(cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn), 16)
        attention_rope.rope_decode_attention(qkv, narrow, *given[2:], turn, prefetch=True, **options)
        if early:  # for `hopper_prefill`
            pages = unpacked_pages.PageRoom.allocate(heads, 16, 64, HALF, "cpu")
            unpacked_pages.unpack_pages(narrow, table, ints, unpacked_pages.UnpackedPages(ints, ints), pages)
    shape = LatentShape(16, 512, 64)
    latents = LayerCache(shape.kv, 16, {"latent": torch.empty(4, 1, 16, shape.width, dtype=HALF)})
    room = attention_decode.DecodeScratch.allocate(split.tasks, 4, shape.blocks, "cpu")
    queries = torch.empty(4, shape.num_heads * shape.width, dtype=HALF)
    latent_attention.latent_decode(queries, latents, table, None, ints, split, room, shape, 0.1,
                                   sizes=latent_attention.decode_sizes(shape, 2, shared), pdl=early)  # fmt: skip


def packed_experts(capability: int) -> None:
    """For a handful of rows and for many."""
    kernels = ExpertKernels(HALF, False, capability >= 90, SHARED[capability], capability >= 90)
    spec = RouterSpec(8, 4)
    for form in ("MXFP4", "fp8", "Q6_K"):
        for tokens in (1, 1024):
            compile_for_hopper.coded_experts(form, tokens, spec, 768, 512, Clamp(7.0, 1.702), kernels)


def others(capability: int) -> None:
    """Kernels of formats, of ranks, of drawing, of the engine's tables; those without matrices need no real sizes."""
    heads, flags = HeadShape(4, 2, 64), torch.zeros(3, dtype=torch.int32)
    state = torch.zeros(meeting.STATE_WORDS, dtype=torch.int64)
    qkv = torch.empty(2, heads.width, dtype=HALF)
    all_head_norm.norm_all_heads(qkv, heads, torch.empty(256), torch.empty(128), 1e-6)
    activation.act(torch.empty(2, 64, dtype=HALF), "gelu")
    norm.layer_norm(torch.empty(2, 64, dtype=HALF), torch.empty(64), None, 1e-5)
    weights.row_weights(torch.empty(2, 64), torch.empty(2), torch.empty(2))
    meeting.meet(torch.zeros(3, dtype=torch.int64), flags, flags, state, 0, 1.0)
    meeting.wait_for(flags, flags, 1, state, 1.0)
    meeting.post(flags, flags)
    inputs.scatter(flags, flags, flags)
    longs = torch.zeros(3, dtype=torch.int64)
    inputs.gather_inputs(flags.view(3, 1), (flags.view(3, 1),), 16, flags, flags, longs, longs, (longs,), flags)
    kept, table = torch.empty(64, 256, dtype=HALF), flags.view(3, 1)
    features.keep_features(kept[:3], kept, table, 16, flags, flags)
    features.keep_projected([kept[:3]] * 3, torch.empty(256, 768, dtype=HALF), kept, table, 16, flags, flags)
    features.add_rows(kept, kept)
    features.fetch_features(kept, table, 16, flags, flags, kept[:3])
    spread.spread(torch.empty(3, 128, dtype=HALF), flags, torch.empty(3, 200, dtype=HALF), -1e9)
    many = torch.empty(3, 12288, dtype=HALF)
    distill.distill(many, many, longs, torch.empty(3), 0.7, torch.empty(3), True)
    trees, drawn = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(1, 3, 2, dtype=torch.int32)
    branch.walk_trees(trees, flags, longs, drawn, flags, table, trees, 0, 16)
    chains.follow_chains(trees, longs, drawn, flags, flags, flags, 0, 5)
    branch.move_branches(cases.make_cache("cpu", HALF, heads, 4, 16), table, trees, trees)
    compile_for_hopper.growing(2, 4, 3)
    wide, weight = torch.empty(2, 4096, dtype=HALF), torch.empty(256, 4096, dtype=HALF)
    for parts in (1, 8):
        linear_fixed.linear_fixed(wide, weight, slices=Slices.of_width(4096), parts=parts)
    for rows in (64, 1024, 8192):  # the tile of few rows and those of many, where the chip has them
        linear_fixed.linear_fixed(torch.empty(rows, 4096, dtype=HALF), torch.empty(6144, 4096, dtype=HALF))
    codes = torch.zeros(256, 128, dtype=torch.uint8)
    packed = linear_codes.pack(QuantizedWeight(codes, torch.ones(256, 1), torch.ones(256, 1), 0.0, 4, 128), HALF)
    linear_codes.unpack(packed, torch.empty(256, 128, dtype=HALF))
    for group in (32, 128):
        packed = linear_codes.pack(QuantizedWeight(codes, torch.ones(256, 128 // group), None, 8, 4, group), HALF)
        codes_few.linear_codes_few(wide[:1, :128].contiguous(), packed, norm=torch.ones(128), gated="silu")
    packed = linear_planes.pack(QuantizedWeight(codes, torch.ones(256, 4), None, 32, 6, 32))
    linear_planes.linear_planes(wide[:, :128].contiguous(), packed)
    linear_planes.unpack(packed, torch.empty(256, 128, dtype=HALF))
    for dtype in (torch.int8, *((coded_rows.FP8,) if capability >= 89 else ())):
        rows, out = coded_rows.quantize_rows(wide, dtype=dtype), torch.empty(2, 256, dtype=HALF)
        coded_rows.norm_rows(wide, None, torch.empty(4096), 1e-6, dtype=dtype)
        linear_bytes.linear_bytes(rows.codes, weight.to(dtype), (torch.empty(256), rows.scales), out=out)
        compile_for_hopper.sliced_bytes(dtype)
    for check in (partial(cases.check_copies, "cpu", HALF, heads, 16), partial(cases.check_draw, "cpu", HALF, 2, 300),
                  partial(cases.check_linear_few, "cpu", HALF, 1, 64, 128)):
        with suppress(AssertionError):
            check()
    if capability >= 90:
        with suppress(AssertionError):
            cases.check_fresh("cpu", HALF, HeadShape(4, 2, 128), [40, 3], attention._ROWS)


def main(capability: int) -> None:
    cases.close = lambda *given: 0.0
    linear_fixed.capability = lambda device: divmod(capability, 10)
    names = ("sampling everything", "sampling rows at hand")
    everything = [(name, launch) for name, launch in compile_for_hopper.sampling() if name in names]
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("heads of 128", partial(steps, capability, DENSE, 40)),
        ("deterministic", partial(steps, capability, DENSE, 40, True)),
        ("heads of 256", partial(steps, capability, LARGE_HEADS, 40)),
        ("latents and experts", partial(steps, capability, LATENTS, 40)),
        ("packed experts", partial(packed_experts, capability)),
        ("decode", partial(decode, capability)),
        ("others", partial(others, capability)),
        *everything,
    ]  # fmt: skip
    found: dict[str, dict[str, int]] = {}
    for name, launch in parts:
        with compiling(capability) as kernels:
            launch()
        for kernel in kernels:
            place = f"{kernel.src.fn.module.rpartition('.')[2]}.{kernel.metadata.name}"
            needed = found.setdefault(name, {})
            needed[place] = max(needed.get(place, 0), kernel.metadata.shared)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
