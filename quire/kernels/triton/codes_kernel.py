"""The kernel of `linear_codes`, in Gluon: GEMMs of a weight of 4-bit codes, which become floats in registers.

As in `prefetch_kernel` one warp prefetches weights, the others multiply. A slab is 64 columns of a tile (128 output
features): 1,024 words of eight codes, in the order in which the tensor cores want their first operand, so that a
thread reads 16 bytes and has the codes that it needs (see `quire.kernels.triton.linear_codes`). Each word becomes
16-bit floats by three or so instructions for two codes: the codes become the low bits of a float of a known exponent.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.prefetch_kernel import load_rows, load_weights, store_tile, whole_tile


def _unpacking(kind: str, one: str, eight: str) -> str:
    """A word's codes become the low bits of floats that count by one (128 to 143 in bf16); 8 more than the first is
    taken off."""
    step = f"lop3.b32 a, w, 0x000F000F, 0x{one}{one}, 0xEA; sub.rn.{kind} a, a, m; mov.b32 {{$%d, $%d}}, a;"
    steps = " shr.u32 w, w, 4; ".join(step % (2 * pair, 2 * pair + 1) for pair in range(4))
    return f"{{ .reg .b32 w, a, m; mov.b32 w, $8; mov.b32 m, 0x{eight}{eight}; {steps} }}"


_BF16 = gl.constexpr(_unpacking("bf16x2", "4300", "4308"))
_FP16 = gl.constexpr(_unpacking("f16x2", "6400", "6408").replace("sub.rn", "sub"))


@gluon.jit
def _codes(words, KIND: gl.constexpr):
    """Of int32 words the eight codes less 8, as floats: codes 0 and 4, 1 and 5, 2 and 6, 3 and 7."""
    if gl.bfloat16 == KIND:
        return gl.inline_asm_elementwise(
            _BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=[gl.bfloat16] * 8, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            _FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=[gl.float16] * 8, is_pure=True, pack=1
        )


@gluon.jit
def _scaled(codes, scale, offset):
    """codes * scale + offset, two at once."""
    KIND: gl.constexpr = "bf16x2" if codes.dtype == gl.bfloat16 else "f16x2"
    FMA: gl.constexpr = "fma.rn." + KIND + " $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(
        FMA, "=r,r,r,r", [codes, scale, offset], dtype=codes.dtype, is_pure=True, pack=2
    )


@gluon.jit
def _operand(
    ring, place, PART: gl.constexpr, DEPTH: gl.constexpr, KIND: gl.constexpr, WORDS: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """[128, DEPTH] codes less 8 as floats of a slab, from column PART * DEPTH on."""
    PER: gl.constexpr = DEPTH // 16
    words = ring.index(place).slice(PART * 8 * PER, 8 * PER, dim=0).load(WORDS)
    return codes_operand(words, DEPTH, KIND, OPERAND)


@gluon.jit
def codes_operand(words, DEPTH: gl.constexpr, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """[features, DEPTH] codes less 8 as floats, of a thread's words: its part of the first operand."""
    PER: gl.constexpr = DEPTH // 16
    WARPS: gl.constexpr = words.shape[0] * words.shape[1] // (32 * PER)
    a, b, c, d, e, f, g, h = _codes(words, KIND)
    # Pairs of columns, the two halves of a tile's rows, the two halves of 16 columns.
    low = gl.join(gl.join(a, b), gl.join(c, d))
    high = gl.join(gl.join(e, f), gl.join(g, h))
    codes = gl.join(low, high).reshape([WARPS, 8, 4, PER, 2, 2, 2])
    codes = codes.permute([0, 5, 1, 3, 6, 2, 4]).reshape([WARPS * 16, DEPTH])
    return gl.convert_layout(codes, OPERAND, assert_trivial=True)


@gluon.jit
def scaled_codes(codes, scales):
    """Codes times their scale plus their offset, in the operand's type."""
    scale = (scales & 0xFFFF).to(gl.int16).to(codes.dtype, bitcast=True)
    offset = (scales >> 16).to(gl.int16).to(codes.dtype, bitcast=True)
    scale, _ = gl.broadcast(scale[:, None], codes)
    offset, _ = gl.broadcast(offset[:, None], codes)
    return _scaled(codes, scale, offset)


@gluon.jit
def _load_scales(
    scales, full, ring, turn, stage, turns, num_features, SLABS: gl.constexpr, RUN: gl.constexpr, GROUP: gl.constexpr
):
    """Of every RUN columns of a turn 128 words: scale and offset of every feature of its tile."""
    RUNS: gl.constexpr = SLABS * 64 // RUN
    for run in gl.static_range(RUNS):
        group = (turn % turns * SLABS * 64 + run * RUN) // GROUP
        place = [group * num_features + turn // turns * 128]
        tma.async_copy_global_to_shared(scales, place, full.index(stage), ring.index(stage * RUNS + run))


@gluon.jit
def _load_turns(
    weight, x, scales, w_ring, x_ring, s_ring, full, free, num_features, begin, end, turns,
    STAGES: gl.constexpr, SLABS: gl.constexpr, RUN: gl.constexpr, GROUP: gl.constexpr, BOXES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: prefetches codes and their scales at once, loads rows when the previous kernel has ended."""
    ROWS: gl.constexpr = SLABS * BOXES * x.block_type.nbytes
    BYTES: gl.constexpr = SLABS * weight.block_type.nbytes + SLABS * 64 // RUN * scales.block_type.nbytes + ROWS
    early = gl.minimum(begin + STAGES, end)
    for turn in range(begin, early):
        load_weights(weight, full, w_ring, turn, turn - begin, turns, 1, SLABS, BYTES)
        _load_scales(scales, full, s_ring, turn, turn - begin, turns, num_features, SLABS, RUN, GROUP)
    if PDL:
        gdc_wait()
    for turn in range(begin, early):
        load_rows(x, full, x_ring, turn, turn - begin, turns, SLABS, BOXES)
    for turn in range(early, end):
        done = turn - begin
        stage = done % STAGES
        mbarrier.wait(free.index(stage), done // STAGES - 1 & 1)
        load_weights(weight, full, w_ring, turn, stage, turns, 1, SLABS, BYTES)
        _load_scales(scales, full, s_ring, turn, stage, turns, num_features, SLABS, RUN, GROUP)
        load_rows(x, full, x_ring, turn, stage, turns, SLABS, BOXES)


@gluon.jit
def _scales_of(ring, stage, RUNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Those of a turn, int32 [128] for each run of its columns."""
    found = (ring.index(stage * RUNS).load(LAYOUT),)
    for run in gl.static_range(1, RUNS):
        found = found + (ring.index(stage * RUNS + run).load(LAYOUT),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _add_weights(
    w_ring, x_ring, stage, held, sums,
    SLABS: gl.constexpr, DEPTH: gl.constexpr, RUN: gl.constexpr, WORDS: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """A turn added to the sums: each code becomes a weight before it is multiplied. The next operand is made while the
    tensor cores work on the one before, whose registers they read until they are done."""
    KIND: gl.constexpr = x_ring.dtype
    PARTS: gl.constexpr = 64 // DEPTH
    operand = scaled_codes(_operand(w_ring, stage * SLABS, 0, DEPTH, KIND, WORDS, OPERAND), held[0])
    for part in gl.static_range(SLABS * PARTS):
        rows = x_ring.index(stage * SLABS + part // PARTS).slice(part % PARTS * DEPTH, DEPTH, dim=1).permute((1, 0))
        sums = warpgroup_mma(operand, rows, sums, is_async=True)
        if part + 1 < SLABS * PARTS:
            place = stage * SLABS + (part + 1) // PARTS
            codes = _operand(w_ring, place, (part + 1) % PARTS, DEPTH, KIND, WORDS, OPERAND)
            following = scaled_codes(codes, held[(part + 1) * DEPTH // RUN])
            sums, operand = warpgroup_mma_wait(0, deps=(sums, operand))
            operand = following
        else:
            sums, operand = warpgroup_mma_wait(0, deps=(sums, operand))
    return sums


@gluon.jit
def _add_run(sums, run, plain, scales, OFFSETS: gl.constexpr, KIND: gl.constexpr):
    """Sums plus what a run of columns with one scale adds: its codes' sums times the scale, its rows' times the
    offset."""
    scale = (scales & 0xFFFF).to(gl.int16).to(KIND, bitcast=True).to(gl.float32)
    sums += run * scale[:, None]
    if OFFSETS:
        offset = (scales >> 16).to(gl.int16).to(KIND, bitcast=True).to(gl.float32)
        sums += plain * offset[:, None]
    return sums


@gluon.jit
def _add_codes(
    w_ring, x_ring, stage, held, sums,
    SLABS: gl.constexpr, DEPTH: gl.constexpr, RUN: gl.constexpr, OFFSETS: gl.constexpr, WORDS: gl.constexpr,
    OPERAND: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """A turn added to the sums: codes themselves are multiplied, and the sum of each run of RUN columns is scaled. With
    few rows that is less work than scaling codes. Offsets need the sums of the rows' columns: an operand of ones gives
    them."""
    KIND: gl.constexpr = x_ring.dtype
    PARTS: gl.constexpr = 64 // DEPTH
    TOTAL: gl.constexpr = SLABS * PARTS
    EACH: gl.constexpr = RUN // DEPTH
    zeros = gl.zeros(sums.shape, gl.float32, SUMS)
    ones = gl.full((128, DEPTH), 1.0, KIND, OPERAND)
    run = zeros
    plain = zeros
    operand = _operand(w_ring, stage * SLABS, 0, DEPTH, KIND, WORDS, OPERAND)
    for part in gl.static_range(TOTAL):
        rows = x_ring.index(stage * SLABS + part // PARTS).slice(part % PARTS * DEPTH, DEPTH, dim=1).permute((1, 0))
        before = run
        before_plain = plain
        run = warpgroup_mma(operand, rows, zeros if part % EACH == 0 else run, is_async=True)
        if OFFSETS:
            plain = warpgroup_mma(ones, rows, zeros if part % EACH == 0 else plain, is_async=True)
        if part % EACH == 0 and part > 0:
            sums = _add_run(sums, before, before_plain, held[part // EACH - 1], OFFSETS, KIND)
        following = operand
        if part + 1 < TOTAL:
            place = stage * SLABS + (part + 1) // PARTS
            following = _operand(w_ring, place, (part + 1) % PARTS, DEPTH, KIND, WORDS, OPERAND)
        if OFFSETS:
            run, plain, operand = warpgroup_mma_wait(0, deps=(run, plain, operand))
        else:
            run, operand = warpgroup_mma_wait(0, deps=(run, operand))
        operand = following
    return _add_run(sums, run, plain, held[TOTAL // EACH - 1], OFFSETS, KIND)


@gluon.jit
def _multiply_codes(
    w_ring, x_ring, s_ring, full, free, bias, residual, out, partial, arrived, num_rows, num_features, begin, end,
    turns, total,
    STAGES: gl.constexpr, SLABS: gl.constexpr, DEPTH: gl.constexpr, RUN: gl.constexpr, SUMMED: gl.constexpr,
    OFFSETS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr, WORDS: gl.constexpr,
    SUMS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: one tile after another, each turn as soon as it is loaded. SUMMED: sums are scaled, else
    codes are."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, SUMS if SUMMED else OPERAND)
    ROWS: gl.constexpr = x_ring.shape[1]
    if PDL:
        gdc_wait()
    for tile in range(begin // turns, (end + turns - 1) // turns):
        first = gl.maximum(begin, tile * turns)
        last = gl.minimum(end, (tile + 1) * turns)
        sums = gl.zeros((128, ROWS), gl.float32, SUMS)
        for turn in range(first, last):
            done = turn - begin
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            held = _scales_of(s_ring, stage, SLABS * 64 // RUN, LAYOUT)
            if SUMMED:
                sums = _add_codes(w_ring, x_ring, stage, held, sums, SLABS, DEPTH, RUN, OFFSETS, WORDS, OPERAND, SUMS)
            else:
                sums = _add_weights(w_ring, x_ring, stage, held, sums, SLABS, DEPTH, RUN, WORDS, OPERAND)
            mbarrier.arrive(free.index(stage))
        acc, complete = whole_tile(sums, tile, first, last, total, gl.num_programs(0), partial, arrived, turns)
        if complete:
            store_tile(
                acc, tile, bias, bias, bias, residual, out, num_rows, num_features, False, BIAS, RESIDUAL, STORED
            )


@gluon.jit(do_not_specialize=["num_rows"])
def codes_kernel(
    weight, x, scales, bias, residual, out, partial, arrived, num_rows, num_features, turns,
    STAGES: gl.constexpr, SLABS: gl.constexpr, DEPTH: gl.constexpr, RUN: gl.constexpr, GROUP: gl.constexpr,
    SUMMED: gl.constexpr, OFFSETS: gl.constexpr, ROWS: gl.constexpr, BOXES: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr, WORDS: gl.constexpr, SUMS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """`weight`: a descriptor of int32 words, a block of 32 x 32 for each slab; `scales`: one of int32 [groups *
    features], a scale in the low half and an offset in the high half of each, which RUN columns of a turn share."""
    HEIGHT: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * SLABS, HEIGHT, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * SLABS, ROWS, x.block_type.shape[1]], x.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [STAGES * (SLABS * 64 // RUN), 128], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    total = (num_features + 127) // 128 * turns
    begin = gl.program_id(0) * total // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    gl.warp_specialize(
        [
            (
                _multiply_codes,
                (w_ring, x_ring, s_ring, full, free, bias, residual, out, partial, arrived, num_rows, num_features,
                 begin, end, turns, total, STAGES, SLABS, DEPTH, RUN, SUMMED, OFFSETS, BIAS, RESIDUAL, PDL, WORDS, SUMS,
                 STORED),
            ),
            (
                _load_turns,
                (weight, x, scales, w_ring, x_ring, s_ring, full, free, num_features, begin, end, turns, STAGES, SLABS,
                 RUN, GROUP, BOXES, PDL),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
