"""Compiles kernels as an H200 runs them, without one, and prints what became of them as JSON; run as a script.

Not under pytest's own process: there the interpreter stands in for the compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
_tests = types.ModuleType("tests")
_tests.__path__ = [str(ROOT / "tests")]
sys.modules.setdefault("tests", _tests)

import torch  # noqa: E402
import triton  # noqa: E402

from quire.attention import triton as attention_backend  # noqa: E402
from quire.bench.gpu import tile_shapes, tune_fixed, tune_prefetch  # noqa: E402
from quire.bench.gpu.row_shapes import row_shapes  # noqa: E402
from quire.kernels.growth import Growing, JudgedRows, NodeRows  # noqa: E402
from quire.kernels.kv_spec import KVSpec  # noqa: E402
from quire.kernels.quantized import QuantizedWeight  # noqa: E402
from quire.kernels.routing import Clamp, RoutedRows, RouterSpec  # noqa: E402
from quire.kernels.sampled_row import Wants  # noqa: E402
from quire.kernels.slices import Slices  # noqa: E402
from quire.kernels.triton import (  # noqa: E402
    activation,
    attention_decode,
    attention_few,
    attention_mixed,
    attention_rope,
    attention_split,
    branch,
    chains,
    code_planes,
    coded_rows,
    codes_row,
    codes_tiles,
    distill,
    expert_codes,
    expert_few,
    expert_linear,
    features,
    fixed_prefetch,
    fixed_tiles,
    growth,
    hopper_prefill,
    latent_attention,
    latent_hopper,
    linear_bytes,
    linear_fixed,
    linear_planes,
    linear_prefetch,
    linear_row,
    linear_sliced_bytes,
    linear_stream,
    norm,
    nucleus_rows,
    rope_cache,
    route,
    sample,
    spread,
)
from quire.kernels.triton.linear_codes import PackedCodes  # noqa: E402
from quire.kernels.types import HeadShape, HeadTurn, LatentShape, LayerCache, pair_cache  # noqa: E402
from quire.ops import device_formats  # noqa: E402
from quire.ops.device_experts import ExpertKernels  # noqa: E402
from quire.ops.device_weights import DeviceGroup  # noqa: E402
from tests.kernels.triton import bits  # noqa: E402
from tests.kernels.triton.fp8_launches import over_fp8  # noqa: E402
from tests.kernels.triton.hopper import compiling, resources  # noqa: E402

HEADS = HeadShape(4, 2, 64)


def instructions(kernel: Any) -> list[str]:
    """Operations of the machine code, in order."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", shown, re.M)


def stores_before_copies(kernel: Any) -> int:
    """Stores to global memory that come before the first asynchronous copy out of it."""
    found = re.findall(r"(st\.global|cp\.async\.c[ag])", kernel.asm["ptx"])
    return next((place for place, operation in enumerate(found) if operation != "st.global"), len(found))


def bulk_copies(kernel: Any) -> list[str]:
    """Copies of the copy engine by the place of their tensor among the parameters, waits, arrivals: in PTX's order."""
    ptx = kernel.asm["ptx"]
    parameter = dict(re.findall(r"mov\.b64\s+(%rd\d+), \w+_param_(\d+);", ptx))
    address = {name: parameter[of] for name, of in re.findall(r"cvta\.param\.u64\s+(%rd\d+), (%rd\d+);", ptx)}
    order = sorted(map(int, set(address.values())))
    found = re.findall(
        r"cp\.async\.bulk\.tensor\S+ \[%r\d+\], \[(%rd\d+),"
        r"|(griddepcontrol\.wait|wgmma\.wait_group|bar\.sync|mbarrier\.arrive(?=\.shared))",
        ptx,
    )
    return [f"copy {order.index(int(address[copied]))}" if copied else operation for copied, operation in found]


def shared_with_barriers(kernel: Any) -> list[int]:
    """Places in shared memory of barriers where something else is stored as well."""
    ptx = kernel.asm["ptx"]
    place = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    begun = {int(place[name]) for name in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx) if name in place}
    return sorted(begun & {int(at) for at in re.findall(r"st\.shared\S*\s+\[%r\d+\+(\d+)\]", ptx)})


def multiplications(kernel: Any) -> list[str]:
    """Warp groups' MMA instructions in PTX's order: rows, features and columns of each."""
    return re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", kernel.asm["ptx"])


def waits(operations: list[str]) -> int:
    """Of the machine code: how often it waits for its MMA instructions."""
    return sum(operation.startswith("WARPGROUP.DEPBAR") for operation in operations)


def machine_copies(operations: list[str]) -> str:
    """Of the machine code: c for a copy of the copy engine, w for the wait for the kernel before."""
    return "".join({"UTMALDG": "c", "ACQBULK": "w"}.get(operation, "") for operation in operations)


def prefetch(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """GEMMs of few rows, of groups of tiles, of shares of tiles, and of as many sums as fit in registers."""
    scratch = linear_prefetch.PrefetchScratch.allocate("cpu", 1)
    linear_prefetch.multiprocessors = lambda device: 132
    features, width = 6144, 4096
    weight, bias = torch.empty(features, width, dtype=dtype), torch.empty(features, dtype=dtype)
    for name, rows, sizes, biased, more in (
        ("prefetch few", 3, (1, 5, 4, 0), False, False),
        ("prefetch tiles", 64, (3, 3, 2, 0), False, False),
        ("prefetch shared", 48, (1, 6, 2, 1), False, True),
        ("prefetch many", 112, (3, 4, 1, 0), True, False),
        ("prefetch thirds", 24, (1, 6, 3, 1), True, False),
        ("prefetch fifths", 16, (1, 4, 5, 0), False, False),
    ):
        given = torch.empty(rows, width, dtype=dtype), weight, bias if biased else None
        residual = torch.empty(rows, features, dtype=dtype) if more else None
        shape = linear_prefetch.PrefetchShape(*sizes)
        yield name, partial(linear_prefetch.linear_prefetch, *given, residual, sizes=shape, scratch=scratch, pdl=True)


def fixed(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """GEMMs of few rows in deterministic mode: without slices, in runs of heads, and in ranges."""
    scratch = linear_prefetch.PrefetchScratch.allocate("cpu", 1)
    linear_prefetch.multiprocessors = fixed_prefetch.multiprocessors = lambda device: 132
    for name, rows, height, width, slices in (
        ("fixed whole", 128, 6144, 4096, None),
        ("fixed heads", 32, 4096, 4096, Slices.each(32, 128)),
        ("fixed ranges", 1, 1024, 3072, Slices.of_width(3072)),
    ):
        x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(height, width, dtype=dtype)
        residual = torch.empty(rows, height, dtype=dtype)
        units = fixed_prefetch.units_for(rows, weight, slices)
        assert units is not None, name
        yield name, partial(fixed_prefetch.linear_fixed_prefetch, x, weight, None, residual,
                            units=units, scratch=scratch, pdl=True)


def tiles(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """GEMMs of deterministic mode by the tiles of few and many rows, and those that `tune_fixed` tries for slices."""
    features, width = 6144, 4096
    weight, bias = torch.empty(features, width, dtype=dtype), torch.empty(features, dtype=dtype)
    for rows in (64, 1024, 8192):
        sizes = linear_fixed.tile_for(rows, features, torch.device("cpu"))
        x, residual = torch.empty(rows, width, dtype=dtype), torch.empty(rows, features, dtype=dtype)
        name = f"tile {sizes.rows} x {sizes.features}"
        yield name, partial(linear_fixed.linear_fixed, x, weight, bias)
        if linear_fixed.tile_for(rows, features, torch.device("cpu"), residual=True) == sizes:
            yield f"{name} and residual", partial(linear_fixed.linear_fixed, x, weight, bias, residual)
    weight = torch.empty(256, width, dtype=dtype)
    for name, slices in (("heads", Slices.each(32, 128)), ("ranges", Slices.of_width(width))):
        for *sizes, parts in tune_fixed.tiles_for(x.shape[0], slices)[1:]:  # the first is the one in use
            yield f"{name} by {' '.join(map(str, sizes))} in {parts}", partial(
                linear_fixed.linear_fixed, x, weight, slices=slices, sizes=linear_fixed.FixedShape(*sizes), parts=parts)


def early_loads(operations: list[str]) -> int:
    """Loads of 16 bytes a thread that come before the wait for the kernel before."""
    before = operations[: operations.index("ACQBULK")] if "ACQBULK" in operations else []
    return sum(operation.startswith("LDG") and operation.endswith("128") for operation in before)


def code_rows(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One row of 4-bit codes: an output projection, and gate and up with their norm."""
    for name, outputs, gated in (("code row", 4096, None), ("code row gated", 24576, "silu")):
        words, pairs = torch.empty(outputs // 4, 2048, dtype=torch.int32), torch.empty(32, outputs, dtype=torch.int32)
        weight = PackedCodes(words, pairs, outputs, 4096, 128, dtype, gated is not None)
        x, gain = torch.empty(1, 4096, dtype=dtype), torch.empty(4096, dtype=dtype) if gated else None
        residual = None if gated else torch.empty(1, outputs, dtype=dtype)
        sizes = codes_row.CodesRowShape(16, 8, 1, 4, 2 if gated else 3)
        yield name, partial(codes_row.linear_codes_row, x, weight, None, residual, norm=gain, gated=gated, sizes=sizes,
                            pdl=True)
    scratch = linear_prefetch.PrefetchScratch.allocate("cpu", 1 << 16)
    words, pairs = torch.empty(1280, 8704, dtype=torch.int32), torch.empty(136, 5120, dtype=torch.int32)
    weight = PackedCodes(words, pairs, 5120, 17408, 128, dtype, False)
    x, residual = torch.empty(1, 17408, dtype=dtype), torch.empty(1, 5120, dtype=dtype)
    for sizes in row_shapes(weight, False, plain=True):
        if sizes.parts > 1:
            yield f"code row in parts {' '.join(map(str, astuple(sizes)))}", partial(
                codes_row.linear_codes_row, x, weight, None, residual, sizes=sizes, scratch=scratch, pdl=True)


def code_tiles(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Many rows of 4-bit codes: every tile that the tuner tries, of an output projection."""
    scratch = linear_prefetch.PrefetchScratch.allocate("cpu")
    codes_tiles.multiprocessors = lambda device: 132
    words, pairs = torch.empty(1024, 2048, dtype=torch.int32), torch.empty(32, 4096, dtype=torch.int32)
    weight = PackedCodes(words, pairs, 4096, 4096, 128, dtype)
    x, residual = torch.empty(256, 4096, dtype=dtype), torch.empty(256, 4096, dtype=dtype)
    for tile in tile_shapes.TILES:
        sizes = codes_tiles.CodesTilesShape(*tile, 3)
        assert codes_tiles.fits(256, weight, sizes, scratch), sizes
        yield f"code tiles {' '.join(map(str, tile))}", partial(
            codes_tiles.linear_codes_tiles, x, weight, None, residual, sizes=sizes, scratch=scratch, pdl=True)


def streams(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Few rows by weights in registers: every shape that `tune_prefetch` tries, of 8B's weights."""
    weights = {"plain": (4096, 12288), "norm": (6144, 4096), "gated": (24576, 4096)}
    for form, (outputs, width) in weights.items():
        weight, gain = torch.empty(outputs, width, dtype=dtype), torch.empty(width, dtype=dtype)
        x, gated = torch.empty(8, width, dtype=dtype), "silu" if form == "gated" else None
        for shape in tune_prefetch.streams_of(form, outputs, width):
            yield f"stream {form} {' '.join(map(str, shape))}", partial(
                linear_stream.linear_stream, x, weight, norm=None if form == "plain" else gain, gated=gated,
                sizes=linear_stream.StreamShape(*shape), pdl=True)


def byte_rows(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One row of fp8, as one that the tuner tries: an output projection, and gate and up with their norm."""
    for name, outputs, gated in (("byte row", 4096, None), ("byte row gated", 24576, "silu")):
        weight = torch.empty(1, dtype=torch.float8_e4m3fn).expand(outputs, 4096)
        x, gain = torch.empty(1, 4096, dtype=dtype), torch.empty(4096, dtype=dtype) if gated else None
        residual = None if gated else torch.empty(1, outputs, dtype=dtype)
        sizes = next(shape for shape in row_shapes(weight, gated is not None) if shape.fetched and shape.steps < 6)
        yield name, partial(codes_row.linear_bytes_row, x, weight, torch.empty(outputs), None, residual, norm=gain,
                            gated=gated, sizes=sizes, pdl=True)


def hopper_tiles(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Kernels of many rows in deterministic mode: every tile that `tune_fixed` tries, and prefill attention."""
    scratch = linear_prefetch.PrefetchScratch.allocate("cpu", 9 << 20)
    fixed_tiles.multiprocessors = hopper_prefill.multiprocessors = lambda device: 132
    deep, seen = fixed_tiles.TileScratch.allocate("cpu", 132), set()
    for name, slices in (("whole", None), ("heads", Slices.each(32, 128)), ("ranges", Slices.of_width(4096))):
        x, weight = (torch.empty(rows, 4096, dtype=dtype) for rows in (1024, 1024))
        for *sizes, band in tune_fixed.hopper_tiles(1024, slices):
            if (name, *sizes) not in seen:  # the band is the one of another number only
                seen.add((name, *sizes))
                shape = fixed_tiles.FixedTiles.of((*sizes, band))
                assert fixed_tiles.fits(x, weight, slices, shape, scratch, deep), shape
                yield f"hopper {name} {' '.join(map(str, sizes))}", partial(
                    fixed_tiles.linear_fixed_tiles, x, weight, None, None, slices, tiles=shape, scratch=scratch,
                    deep=deep, pdl=True)
    heads, ints = HeadShape(16, 8, 128), torch.zeros(4, dtype=torch.int32)
    half, table = partial(torch.empty, dtype=dtype), torch.zeros(4, 8, dtype=torch.int32)
    cache = pair_cache(half(4, 8, 16, 128), half(4, 8, 16, 128), 16)
    gain, longs = torch.empty(128), torch.zeros(4, dtype=torch.int64)
    raw = hopper_prefill.RawHeads(HeadTurn(torch.empty(64, 128), gain, gain, 1e-6), longs, longs)
    for name, sizes, given in (
        ("prefill", hopper_prefill.PREFILL, None), ("decode", hopper_prefill.DECODE, None),
        ("many", hopper_prefill.DECODE_MANY, None), ("turned decode", hopper_prefill.DECODE, raw),
        ("turned many", hopper_prefill.DECODE_MANY, raw), ("few", hopper_prefill.DECODE_FEW, None),
        ("turned few", hopper_prefill.DECODE_FEW, raw),
        ("turned without norms", hopper_prefill.DECODE, replace(raw, turn=HeadTurn(raw.turn.rope))),
    ):  # fmt: skip
        yield f"hopper {name}", lambda s=sizes, r=given: hopper_prefill.hopper_prefill(
            half(4, heads.width), cache, table, ints, ints, ints, ints, ints, heads, 0.1, out=half(4, 16 * 128),
            sizes=s, pdl=s is not hopper_prefill.PREFILL, raw=r)
    for name, options in (("", {}), (" once", {"once": True}), (" in trees", {"detours": table})):
        yield f"heads of 128{name}", lambda o=options: attention_mixed.mixed_attention(
            half(4, heads.width), cache, table, ints, ints, ints, ints, ints, heads, 0.1, exact=True, pdl=True,
            sizes=attention_backend._FIXED_HOPPER, **o)


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    x, gain, weight = torch.empty(1, 1024, dtype=dtype), torch.empty(1024), torch.empty(256, 1024, dtype=dtype)
    qkv = torch.empty(2, HEADS.width, dtype=dtype)
    cache = pair_cache(torch.empty(4, 2, 16, 64, dtype=dtype), torch.empty(4, 2, 16, 64, dtype=dtype), 16)
    ints, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    table, rope = torch.zeros(4, 8, dtype=torch.int32), torch.empty(64, 64)
    split = attention_split.DecodeSplit.allocate(4, 8, "cpu")
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, 4, HEADS, "cpu")
    small = dtype == torch.float32
    sizes = attention_mixed.MixedShape(32, 32, 4, 2) if small else attention_mixed.MixedShape(64, 64, 4, 3)
    row = linear_row.RowShape(2)
    yield "norm", lambda: norm.add_rms_norm(x, x, gain, 1e-6, pdl=True)
    yield "gate", lambda: activation.act_mul(x, "silu", pdl=True)
    yield "row", lambda: linear_row.linear_row(x, weight, norm=gain, gated="silu", sizes=row, pdl=True)
    yield "rope", lambda: rope_cache.rope_and_cache(qkv, cache, longs, longs, HEADS, rope, None, None, 0.0, pdl=True)
    yield "decode", lambda: attention_decode.decode_attention(
        qkv, cache, table, ints, ints, split, scratch, HEADS, 0.1, num_stages=3, pdl=True
    )
    heads, gain = HeadShape(16, 8, 128), torch.empty(128)
    wide = pair_cache(torch.empty(4, 8, 16, 128, dtype=dtype), torch.empty(4, 8, 16, 128, dtype=dtype), 16)
    turn = HeadTurn(torch.empty(64, 128), gain, gain, 1e-6)
    parts = attention_decode.DecodeScratch.allocate(split.tasks, 4, heads, "cpu")
    yield "turned decode", lambda: attention_rope.rope_decode_attention(
        torch.empty(2, heads.width, dtype=dtype), wide, table, ints, ints, split, parts, heads, 0.1, turn,
        num_stages=3, prefetch=True, pdl=True,
    )
    if not small:
        yield "few decode", lambda: attention_few.few_decode_attention(
            torch.empty(2, heads.width, dtype=dtype), wide, table, ints, ints, split, parts, heads, 0.1, turn, pdl=True)
        for name, each in (("drafted decode", turn), ("drafted decode without norms", HeadTurn(turn.rope))):
            yield name, lambda t=each: attention_few.few_decode_attention(
                torch.empty(8, heads.width, dtype=dtype), wide, table, ints, ints, split, parts, heads, 0.1, t,
                drafts=True, pdl=True)
        yield from over_fp8(dtype)
    for name, exact in (("exact", True), ("mixed", False)):
        yield name, lambda e=exact: attention_mixed.mixed_attention(
            qkv, cache, table, ints, ints, ints, ints, ints, HEADS, 0.1, sizes=sizes, exact=e
        )
    for name, slices in (("heads", Slices.each(32, 128)), ("ranges", Slices.of_width(4096))):
        wide_x, wide_weight = torch.empty(2, 4096, dtype=dtype), torch.empty(256, 4096, dtype=dtype)
        for parts in (1, slices.count // 8, slices.count):
            yield f"{name} in {parts}", partial(
                linear_fixed.linear_fixed, wide_x, wide_weight, slices=slices, parts=parts)
    if not small:
        yield from code_rows(dtype)
        yield from code_tiles(dtype)
        yield from streams(dtype)
        yield from byte_rows(dtype)
        yield from prefetch(dtype)
        yield from fixed(dtype)
        yield from tiles(dtype)
        yield from hopper_tiles(dtype)


def sampling(vocab: int = 151936, rows: int = 4) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What draws tokens, by what its rows ask for."""
    scratch = sample.SampleScratch.allocate(rows, vocab, "cpu")
    ints = partial(torch.zeros, dtype=torch.int32)
    step = sample.SampledStep(
        ints(65536), torch.empty(rows, vocab, dtype=torch.bfloat16), ints(8, 4096), ints(2, rows, 2), ints(2, rows, 64),
        torch.empty(rows, vocab), ints(rows, vocab),
    )  # fmt: skip
    cut = Wants.DRAW | Wants.TOP_K | Wants.TOP_P
    every = cut | Wants.MASKS | Wants.CHANGES | Wants.PENALTIES | Wants.LOGPROBS
    for name, wants in (
        ("plain", Wants.DRAW), ("top_p", Wants.DRAW | Wants.TOP_P), ("top_k", Wants.DRAW | Wants.TOP_K),
        ("penalties", Wants.DRAW | Wants.PENALTIES), ("everything", every),
    ):  # fmt: skip
        yield f"sampling {name}", partial(sample.sample_rows, step, rows, wants, scratch)
    floats = torch.empty(rows)
    yield "sampling rows at hand", partial(nucleus_rows.draw_nucleus, step.edited, torch.arange(rows), floats, floats,
                                           floats, floats.double(), torch.zeros(rows, 3, dtype=torch.int64))


def experts(tokens: int, spec: RouterSpec, hidden: int, inner: int, clamp: Clamp | None) -> None:
    """All launches of a layer of experts."""
    half = partial(torch.empty, dtype=torch.bfloat16)
    bias = None if clamp is None else half(spec.num_experts, 2 * inner)
    load, slots = torch.zeros(spec.num_experts, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
    chosen, gains = route.choose(RoutedRows(spec, torch.empty(tokens, spec.num_experts), None, slots, load))
    up, down = half(spec.num_experts, 2 * inner, hidden), half(spec.num_experts, hidden, inner)
    if chosen.numel() <= expert_few.FEW_PAIRS:
        between = expert_few.few_up(half(tokens, hidden), up, bias, chosen, "silu", clamp, pdl=True)
        expert_few.few_down(between, down, None, chosen, gains, pdl=True)
        return
    choice = expert_linear.expert_choice(chosen.numel(), spec.num_experts)
    blocks = route.block_experts(chosen, spec.num_experts, choice.up.rows)
    for copied in (False, True) if tokens == 256 else (False,):
        sizes = replace(choice.up, copied=copied), replace(choice.down, copied=copied)
        between = expert_linear.up_experts(half(tokens, hidden), up, bias, chosen, blocks, "silu", clamp, sizes[0])
        found = expert_linear.down_experts(between, down, None, chosen, gains, blocks, sizes[1])
    expert_linear.sum_pairs(found, spec.top_k)


CODED = {
    "MXFP4": (4, 0, 32, code_planes.E2M1, torch.uint8), "int4": (4, 0, 128, code_planes.INTEGERS, torch.float16),
    "fp8": (8, 0, 128, code_planes.E4M3, torch.float32), "Q6_K": (6, 32, 16, code_planes.INTEGERS, torch.float16),
    "Q5_K": (5, 0, 32, code_planes.INTEGERS, torch.float16),
}  # fmt: skip
"""Bits, zero, group, kind of numbers and type of scales of experts that stay packed."""


def coded_group(form: str, experts: int, features: int, width: int, biased: bool) -> DeviceGroup:
    bits, zero, group, numbers, dtype = CODED[form]
    pieces = code_planes.planes(torch.zeros(1, width, dtype=torch.uint8), bits).shape
    scales = torch.empty(-(-width // group), experts * features, dtype=dtype)
    packed = expert_codes.CodedExperts(
        torch.empty(*pieces[:2], experts * features, 32, dtype=torch.uint8), scales,
        scales if form in ("int4", "Q5_K") else None, None, features, width, bits, zero, group, numbers,
    )  # fmt: skip
    return DeviceGroup((), packed, torch.empty(experts, features, dtype=torch.bfloat16) if biased else None)


def coded_experts(
    form: str, tokens: int, spec: RouterSpec, hidden: int, inner: int, clamp: Clamp | None = None,
    kernels: ExpertKernels = ExpertKernels(torch.bfloat16, False, True, 227 << 10, True),  # noqa: B008 (frozen)
) -> None:  # fmt: skip
    """All launches of a layer of experts that stay packed, as the operations choose them."""
    slots = torch.zeros(tokens, dtype=torch.int64)
    rows = RoutedRows(spec, torch.empty(tokens, spec.num_experts), None, slots, None)
    up = coded_group(form, spec.num_experts, 2 * inner, hidden, clamp is not None)
    down = coded_group(form, spec.num_experts, hidden, inner, clamp is not None)
    kernels.routed(torch.empty(tokens, hidden, dtype=torch.bfloat16), rows, up, down, "silu", clamp, None)


def sinks(heads: HeadShape) -> None:
    """Attention with sinks, as gpt-oss has it in its layers with a window."""
    half, ints = partial(torch.empty, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    cache = pair_cache(*(half(4, heads.num_kv_heads, 16, heads.head_dim) for _ in range(2)), 16)
    table, qkv = torch.zeros(4, 8, dtype=torch.int32), half(2, heads.width)
    split = attention_split.DecodeSplit.allocate(4, 8, "cpu")
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, 4, heads, "cpu")
    turn = HeadTurn(torch.empty(64, heads.head_dim), sinks=torch.empty(heads.num_heads))
    attention_rope.rope_decode_attention(
        qkv, cache, table, ints, ints, split, scratch, heads, 0.1, turn, window=128, carried=True, keys=64,
        num_stages=3, prefetch=True, pdl=True,
    )  # fmt: skip
    attention_mixed.mixed_attention(
        qkv, cache, table, ints, ints, ints, ints, ints, heads, 0.1, window=128, sinks=turn.sinks,
        sizes=attention_mixed.MixedShape(128, 64, 4, 3),
    )  # fmt: skip


def growing(most: int, width: int, depth: int) -> None:
    """Trees of drafts, level by level, and the step that judges them."""
    zeros = partial(torch.zeros, dtype=torch.int32)
    grown = Growing.allocate(4, width, most, depth, zeros(4, 6), zeros(1))
    nodes = NodeRows.allocate(4 * most, depth, torch.device("cpu"))
    for first in (True, False):
        likely = torch.zeros(4 * most, width)
        growth.grow(grown, likely.long(), likely, zeros(4 * most, 2), nodes, 4, first)
    judged = JudgedRows(zeros(4, 4), zeros(64), zeros(64), zeros(64), zeros(64, 1 + depth), zeros(4, 128))
    growth.finish(grown, judged, 4, 16)


def drafts(heads: HeadShape, hidden: int = 4096) -> None:
    """What heads and trees of drafts need: hidden states by slot, attention along detours, branches."""
    half, ints = partial(torch.empty, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    table, kept = torch.zeros(4, 8, dtype=torch.int32), half(64, hidden)
    features.keep_features(half(4, hidden), kept, table, 16, ints, ints)
    features.fetch_features(kept, table, 16, ints, ints, half(4, hidden))
    spread.spread(half(4, 32000), ints, half(4, 151936), -1e9)
    zeros = partial(torch.zeros, dtype=torch.int32)
    trees, path = zeros(4, 4), zeros(4, 8)
    many = half(4, 12288)
    distill.distill(many, many, ints.long(), torch.empty(4), 0.7, torch.empty(4), True)  # for training heads
    branch.walk_trees(trees, zeros(64), zeros(64).long(), zeros(32, 64, 2), ints[:1], zeros(4, 128), path, 0, 16)
    chains.follow_chains(trees, zeros(64).long(), zeros(32, 64, 2), ints[:1], zeros(20), zeros(20), 0, 5)
    cache = pair_cache(*(half(4, heads.num_kv_heads, 16, heads.head_dim) for _ in range(2)), 16)
    branch.move_branches(cache, table, trees, path)
    states = LayerCache(KVSpec.feature(hidden), 16, {"feature": half(4, 1, 16, hidden)})
    branch.move_branches(states, table, trees, path)
    split = attention_split.DecodeSplit.allocate(4, 8, "cpu")
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, 4, heads, "cpu")
    qkv = half(4, heads.width)
    attention_decode.decode_attention(
        qkv, cache, table, ints, ints, split, scratch, heads, 0.1, keys=64, num_stages=3, halves=True, pdl=True,
        detours=path,
    )  # fmt: skip
    attention_mixed.mixed_attention(
        qkv, cache, table, ints, ints, ints, ints, ints, heads, 0.1, detours=path, exact=True,
        sizes=attention_backend._FIXED_HOPPER,
    )  # fmt: skip


def latents(shape: LatentShape, sequences: int = 4) -> None:
    """Decode and prefill attention over latents."""
    ints = torch.zeros(sequences + 1, dtype=torch.int32)
    table = torch.zeros(sequences, 8, dtype=torch.int32)
    split = attention_split.DecodeSplit.allocate(sequences, 8, "cpu")
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, sequences, shape.blocks, "cpu")
    q = torch.empty(sequences, shape.num_heads * shape.width, dtype=torch.bfloat16)
    cache = LayerCache(shape.kv, 16, {"latent": torch.empty(4, 1, 16, shape.width, dtype=torch.bfloat16)})
    latent_attention.latent_decode(q, cache, table, None, ints[1:], split, scratch, shape, 0.1)
    latent_hopper.hopper_decode(q, cache, table, None, ints[1:], split, scratch, shape, 0.1, pdl=True)
    latent_attention.latent_tiles(q, cache, table, None, ints, ints[1:], ints, ints, shape, 0.1)


def sliced_bytes(*dtypes: torch.dtype) -> None:
    """Rows and weights of bytes in slices: 32 heads and an MLP's eight ranges, of few rows and of many, with one scale
    a feature, a scale a slice, and blocks that slices cut."""
    sums = (Slices.of_heads(32, 128), Slices.of_width(8960))
    for dtype, slices in ((dtype, slices) for dtype in dtypes for slices in sums):
        width, x = slices.sum_width, torch.empty(2, 512, dtype=torch.bfloat16)
        rows = coded_rows.quantize_rows(x, dtype=dtype, peaks=torch.empty(2))
        for group, count in ((None, 2), (slices.longest, 2048), *(((128, 64),) if dtype != torch.int8 else ())):
            scales = torch.empty(512) if group is None else torch.empty(512, -(-width // group))
            weight = linear_sliced_bytes.SlicedBytes(torch.empty(512, width, dtype=dtype), scales, group, slices)
            linear_sliced_bytes.linear_sliced(torch.empty(count, width, dtype=dtype), rows.scales, weight, None, None,
                                              out=torch.empty(count, 512, dtype=torch.bfloat16))
    coded_rows.row_peaks(torch.empty(2, 4096, dtype=torch.bfloat16))


def quantized() -> None:
    """GEMMs of packed codes and of int8, and attention over keys and values in fp8."""
    half, ints = partial(torch.empty, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    for width, zero, group in ((8, 128, 32), (6, 32, 16), (5, 16, 32)):
        codes = torch.zeros(256, 1024, dtype=torch.uint8)
        packed = linear_planes.pack(QuantizedWeight(codes, torch.ones(256, 1024 // group), None, zero, width, group))
        linear_planes.linear_planes(half(64, 1024), packed, pdl=True)
        linear_planes.unpack(packed, half(256, 1024))
    byte = partial(torch.empty, dtype=torch.int8)
    for rows in (1, 64, 512):
        sizes = linear_bytes.BytesShape(*next(tile for most, tile in device_formats.INT8_TILES if rows <= most))
        linear_bytes.linear_bytes(byte(rows, 1024), byte(512, 1024), (torch.ones(512), torch.ones(rows)),
                                  out=half(rows, 512), sizes=sizes)
    sliced_bytes(torch.int8, coded_rows.FP8)
    coded_rows.norm_rows(half(4, 1024), half(4, 1024), torch.ones(1024), 1e-6, dtype=torch.int8, pdl=True)
    heads, table = HeadShape(16, 8, 128), torch.zeros(4, 8, dtype=torch.int32)
    cache = pair_cache(*(torch.empty(4, 8, 16, 128, dtype=torch.float8_e4m3fn) for _ in range(2)), 16)
    cache.scales = torch.ones(2, 8)
    split = attention_split.DecodeSplit.allocate(4, 8, "cpu")
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, 4, heads, "cpu")
    turn, qkv = HeadTurn(torch.empty(64, 128), torch.empty(128), torch.empty(128), 1e-6), half(2, heads.width)
    attention_rope.rope_decode_attention(
        qkv, cache, table, ints, ints, split, scratch, heads, 0.1, turn, keys=64, num_stages=3, carried=True,
        prefetch=True, pdl=True,
    )  # fmt: skip
    attention_mixed.mixed_attention(qkv, cache, table, ints, ints, ints, ints, ints, heads, 0.1,
                                    sizes=attention_mixed.MixedShape(128, 64, 8, 3))


def families() -> dict[str, str]:
    """Kernels that only some requests and models need, at real sizes: what became of each, by name."""
    clamp, gpt_oss = Clamp(7.0, 1.702), RouterSpec(32, 4)
    parts: list[tuple[str, Callable[[], Any]]] = [
        *sampling(),
        *((f"experts of {tokens}", partial(experts, tokens, RouterSpec(128, 8), 2048, 768, None))
          for tokens in (1, 256, 8192)),
        ("sinks", partial(sinks, HeadShape(64, 8, 64))),
        ("drafts", partial(drafts, HeadShape(32, 8, 128))),
        ("trees", partial(growing, 2, 4, 4)),
        ("wide trees", partial(growing, 8, 16, 8)),
        ("quantized", quantized),
        *((f"experts of {tokens} in MXFP4", partial(coded_experts, "MXFP4", tokens, gpt_oss, 2880, 2880, clamp))
          for tokens in (1, 256, 8192)),
        *((f"experts of {tokens} in {form}", partial(coded_experts, form, tokens, RouterSpec(128, 8), 2048, 768))
          for form in ("int4", "fp8", "Q6_K") for tokens in (1, 256)),
        ("clamped experts", partial(experts, 256, gpt_oss, 2880, 2880, clamp)),
        *((f"latents of {heads} heads", partial(latents, LatentShape(heads, 512, 64))) for heads in (16, 128)),
    ]  # fmt: skip
    found = {}
    for name, launch in parts:
        with compiling() as kernels:
            launch()
        found |= {f"{name}: {place} {kernel.metadata.name}": resources(kernel) for place, kernel in enumerate(kernels)}
    return found


def variants(dtype: torch.dtype) -> dict[str, int]:
    """How many kernels each operation of deterministic mode is compiled to, over batches of many sizes."""
    found: dict[str, int] = {}
    rows = 700
    checks = [*bits.row_wise("cpu", dtype, rows, 96, 64), *bits.rotations("cpu", dtype, rows, HEADS)]
    checks.append(("attention", bits.attention("cpu", dtype, rows, HEADS, None, None)))
    checks.append(("attention in a window", bits.attention("cpu", dtype, rows, HEADS, 100, None)))
    for name, part in checks:
        with compiling() as kernels:
            for count in (1, 2, 7, 8, 9, 64, 65, 512, 513, rows):
                part(0, count)
        found[name] = len({kernel.hash for kernel in kernels})
    x, weight = torch.empty(8192, 96, dtype=dtype), torch.empty(6144, 96, dtype=dtype)
    with compiling() as kernels:
        for count in (1, 64, 65, 256, 257, 1024, 4096, 8192):
            linear_fixed.linear_fixed(x[:count], weight)
    return found | {"wide GEMM": len({kernel.hash for kernel in kernels})}


def main() -> None:
    found: dict[str, Any] = {}
    linear_fixed.capability = lambda device: (9, 0)
    only = {torch.float32: ("exact", "mixed"),
            torch.float16: ("prefetch few", "code row", "byte row", "few decode", "code tiles 3 64 64 6")}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, launch in launches(dtype):
            if name not in only.get(dtype, (name,)):
                continue
            with compiling() as kernels:
                launch()
            whole = instructions(kernels[0])
            operations = [operation.split(".")[0] for operation in whole]
            found[f"{name} {str(dtype)[6:]}"] = {
                "resources": resources(kernels[0]), "shared": kernels[0].metadata.shared,
                "fused": operations.count("FFMA"), "barriers": operations.count("BAR"),
                "stores_before_copies": stores_before_copies(kernels[0]), "matrix_loads": operations.count("LDSM"),
                "shared_with_barriers": shared_with_barriers(kernels[0]),
                "bulk_copies": bulk_copies(kernels[0]), "machine_copies": machine_copies(operations),
                "multiplications": multiplications(kernels[0]), "instructions": len(operations),
                "early_loads": early_loads(whole), "byte_products": operations.count("IMMA"),
                "from_fp8": whole.count("F2FP.F16.E4M3.UNPACK_B"), "asked": whole.count("UBLKPF.L2"),
                "byte_loads": whole.count("LDS.U8"),
                "drains": operations.count("WARPGROUP") and waits(instructions(kernels[0])),
            }  # fmt: skip
    found["variants"] = {str(dtype)[6:]: variants(dtype) for dtype in (torch.bfloat16, torch.float32)}
    found["families"] = families()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
