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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.prefetch_kernel import load_turns, store_tile, whole_tile


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
    ring, place, scales, PART: gl.constexpr, DEPTH: gl.constexpr, KIND: gl.constexpr, WORDS: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """[128, DEPTH] floats of a slab, from column PART * DEPTH on."""
    PER: gl.constexpr = DEPTH // 16
    words = ring.index(place).slice(PART * 8 * PER, 8 * PER, dim=0).load(WORDS)
    a, b, c, d, e, f, g, h = _codes(words, KIND)
    # Pairs of columns, the two halves of a tile's rows, the two halves of 16 columns.
    low = gl.join(gl.join(a, b), gl.join(c, d))
    high = gl.join(gl.join(e, f), gl.join(g, h))
    codes = gl.join(low, high).reshape([8, 8, 4, PER, 2, 2, 2])
    codes = codes.permute([0, 5, 1, 3, 6, 2, 4]).reshape([128, DEPTH])
    codes = gl.convert_layout(codes, OPERAND, assert_trivial=True)
    scale = (scales & 0xFFFF).to(gl.int16).to(codes.dtype, bitcast=True)
    offset = (scales >> 16).to(gl.int16).to(codes.dtype, bitcast=True)
    scale, _ = gl.broadcast(scale[:, None], codes)
    offset, _ = gl.broadcast(offset[:, None], codes)
    return _scaled(codes, scale, offset)


@gluon.jit
def _scales_of(
    scales, turn, turns, num_features, SLABS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Of every DEPTH columns of a turn int32 [128]: scale and offset of every feature of its tile."""
    feature = turn // turns * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, OPERAND))
    real = feature < num_features
    place = scales + feature
    first = turn % turns * SLABS * 64
    found = (gl.load(place + first // GROUP * num_features, mask=real, other=0),)
    for part in gl.static_range(1, SLABS * 64 // DEPTH):
        group = (first + part * DEPTH) // GROUP
        more = gl.load(place + group * num_features, mask=real, other=0)
        found = found + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _multiply_codes(
    w_ring, x_ring, full, free, scales, bias, residual, out, partial, arrived, num_rows, num_features, begin, end,
    turns, total,
    STAGES: gl.constexpr, SLABS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr, WORDS: gl.constexpr, SUMS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: one tile after another, each turn as soon as it is loaded."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = x_ring.shape[1]
    KIND: gl.constexpr = x_ring.dtype
    PARTS: gl.constexpr = 64 // DEPTH
    held = _scales_of(scales, begin, turns, num_features, SLABS, DEPTH, GROUP, OPERAND)
    if PDL:
        gdc_wait()
    for tile in range(begin // turns, (end + turns - 1) // turns):
        first = gl.maximum(begin, tile * turns)
        last = gl.minimum(end, (tile + 1) * turns)
        sums = gl.zeros((128, ROWS), gl.float32, SUMS)
        for turn in range(first, last):
            done = turn - begin
            stage = done % STAGES
            # Scales of the next turn are loaded while this one is multiplied.
            after = gl.minimum(turn + 1, end - 1)
            coming = _scales_of(scales, after, turns, num_features, SLABS, DEPTH, GROUP, OPERAND)
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            for part in gl.static_range(SLABS * PARTS):
                place = stage * SLABS + part // PARTS
                operand = _operand(w_ring, place, held[part], part % PARTS, DEPTH, KIND, WORDS, OPERAND)
                rows = x_ring.index(place).slice(part % PARTS * DEPTH, DEPTH, dim=1).permute((1, 0))
                sums = warpgroup_mma(operand, rows, sums, is_async=True)
                # The multiply-add reads the registers of the operand until it is done.
                sums, operand = warpgroup_mma_wait(0, deps=(sums, operand))
            mbarrier.arrive(free.index(stage))
            held = coming
        acc, complete = whole_tile(sums, tile, first, last, total, gl.num_programs(0), partial, arrived, turns)
        if complete:
            store_tile(
                acc, tile, bias, bias, bias, residual, out, num_rows, num_features, False, BIAS, RESIDUAL, STORED
            )


@gluon.jit(do_not_specialize=["num_rows"])
def codes_kernel(
    weight, x, scales, bias, residual, out, partial, arrived, num_rows, num_features, turns,
    STAGES: gl.constexpr, SLABS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    BOXES: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr, WORDS: gl.constexpr,
    SUMS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """`weight`: a descriptor of int32 words, a block of 32 x 32 for each slab; `scales`: int32 [groups, features], a
    scale in the low half and an offset in the high half of each."""
    HEIGHT: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * SLABS, HEIGHT, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * SLABS, ROWS, x.block_type.shape[1]], x.layout)
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
                (w_ring, x_ring, full, free, scales, bias, residual, out, partial, arrived, num_rows, num_features,
                 begin, end, turns, total, STAGES, SLABS, DEPTH, GROUP, BIAS, RESIDUAL, PDL, WORDS, SUMS, STORED),
            ),
            (load_turns, (weight, x, w_ring, x_ring, full, free, begin, end, turns, STAGES, 1, SLABS, BOXES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip
