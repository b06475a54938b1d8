"""The kernel of `linear_prefetch`, in Gluon, Triton's lower layer: Triton itself cannot say when a copy begins.

A slab is 128 bytes of every row (64 columns in a 16-bit type, 128 in fp8), of a tile of the weight (64 output features)
or of all rows. A turn is some slabs of a group of tiles and the same of the rows: a stage of the ring. Turns are
numbered through all groups of the weight, and every program has an equal share of them, of at least one. One warp loads
turns, the others multiply them; barrier `full` counts the bytes that arrived in a stage, barrier `free` says that the
stage was read.
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


@gluon.jit
def load_weights(
    weight, full, ring, turn, stage, turns, TILES: gl.constexpr, SLABS: gl.constexpr, BYTES: gl.constexpr
):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    mbarrier.expect(full.index(stage), BYTES)
    for slab in gl.static_range(SLABS):
        for tile in gl.static_range(TILES):
            place = [(turn // turns * TILES + tile) * FEATURES, (turn % turns * SLABS + slab) * WIDTH]
            target = ring.index((stage * SLABS + slab) * TILES + tile)
            tma.async_copy_global_to_shared(weight, place, full.index(stage), target)


@gluon.jit
def load_rows(x, full, ring, turn, stage, turns, SLABS: gl.constexpr, BOXES: gl.constexpr):
    """Box by box, and only boxes with rows in them: TMA takes longer to fill a box with zeros than to copy one, and the
    sums of missing rows are never stored."""
    HEIGHT: gl.constexpr = x.block_type.shape[0]
    WIDTH: gl.constexpr = x.block_type.shape[1]
    for slab in gl.static_range(SLABS):
        column = (turn % turns * SLABS + slab) * WIDTH
        rows = ring.index(stage * SLABS + slab)
        for box in gl.static_range(BOXES):
            target = rows.slice(box * HEIGHT, HEIGHT, dim=0)
            tma.async_copy_global_to_shared(x, [box * HEIGHT, column], full.index(stage), target)


@gluon.jit
def load_turns(
    weight, x, w_ring, x_ring, full, free, begin, end, turns,
    STAGES: gl.constexpr, TILES: gl.constexpr, SLABS: gl.constexpr, BOXES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: prefetches weights at once, loads rows when the previous kernel has ended."""
    BYTES: gl.constexpr = SLABS * (TILES * weight.block_type.nbytes + BOXES * x.block_type.nbytes)
    early = gl.minimum(begin + STAGES, end)
    for turn in range(begin, early):
        load_weights(weight, full, w_ring, turn, turn - begin, turns, TILES, SLABS, BYTES)
    if PDL:
        gdc_wait()
    for turn in range(begin, early):
        load_rows(x, full, x_ring, turn, turn - begin, turns, SLABS, BOXES)
    for turn in range(early, end):
        done = turn - begin
        stage = done % STAGES
        mbarrier.wait(free.index(stage), done // STAGES - 1 & 1)
        load_weights(weight, full, w_ring, turn, stage, turns, TILES, SLABS, BYTES)
        load_rows(x, full, x_ring, turn, stage, turns, SLABS, BOXES)


@gluon.jit
def multiply_turn(w_ring, x_ring, stage, sums, TILES: gl.constexpr, SLABS: gl.constexpr):
    """Starts the multiply-adds of one more turn; those of the turn before are finished when this returns."""
    for slab in gl.static_range(SLABS):
        rows = x_ring.index(stage * SLABS + slab).permute((1, 0))
        first = (stage * SLABS + slab) * TILES
        grown = (warpgroup_mma(w_ring.index(first), rows, sums[0], is_async=True),)
        for tile in gl.static_range(1, TILES):
            more = warpgroup_mma(w_ring.index(first + tile), rows, sums[tile], is_async=True)
            grown = grown + (more,)  # type: ignore[assignment]  # noqa: RUF005
        sums = grown
    return waited(sums, SLABS * TILES, TILES)


@gluon.jit
def waited(sums, left: gl.constexpr, TILES: gl.constexpr):
    """The sums, once at most `left` asynchronous multiply-adds are still running."""
    if TILES == 1:
        return (warpgroup_mma_wait(left, deps=(sums[0],)),)
    else:
        return warpgroup_mma_wait(left, deps=sums)


@gluon.jit
def _multiply(
    w_ring, x_ring, full, free, w_scale, x_scale, bias, residual, out, partial, arrived, num_rows, num_features, begin,
    end, turns, total,
    STAGES: gl.constexpr, TILES: gl.constexpr, SLABS: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr, SUMS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: one group of tiles after another, each turn as soon as it is loaded."""
    FEATURES: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    if PDL:
        gdc_wait()
    for group in range(begin // turns, (end + turns - 1) // turns):
        first = gl.maximum(begin, group * turns)
        last = gl.minimum(end, (group + 1) * turns)
        sums = (gl.zeros((FEATURES, ROWS), gl.float32, SUMS),) * TILES
        for turn in range(first, last):
            done = turn - begin
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            sums = multiply_turn(w_ring, x_ring, stage, sums, TILES, SLABS)
            # The turn before this one has been read: its stage may be filled again.
            mbarrier.arrive(free.index((done + STAGES - 1) % STAGES), pred=turn > first)
        sums = waited(sums, 0, TILES)
        mbarrier.arrive(free.index((last - 1 - begin) % STAGES))
        if TILES == 1:
            acc, complete = whole_tile(sums[0], group, first, last, total, gl.num_programs(0), partial, arrived, turns)
            if complete:
                store_tile(
                    acc, group, w_scale, x_scale, bias, residual, out, num_rows, num_features, SCALED, BIAS, RESIDUAL,
                    STORED,
                )  # fmt: skip
        else:
            for tile in gl.static_range(TILES):
                place = group * TILES + tile
                store_tile(
                    sums[tile], place, w_scale, x_scale, bias, residual, out, num_rows, num_features, SCALED, BIAS,
                    RESIDUAL, STORED,
                )  # fmt: skip


@gluon.jit
def whole_tile(acc, tile, first, last, total, programs, partial, arrived, turns):
    """(the tile's sum, whether this program has it): at once if it saw all columns, else if it is the last one."""
    FEATURES: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    complete = last - first == turns
    if not complete:
        feature = gl.arange(0, FEATURES, layout=gl.SliceLayout(1, acc.type.layout))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, acc.type.layout))
        inside = feature[:, None] * ROWS + row[None, :]
        SIZE: gl.constexpr = FEATURES * ROWS
        # Shares are equal, so a turn's number gives its program. A program has room for two parts: the second is for a
        # tile whose first turns it has, the first for any other tile. It has at most one of either kind.
        begin = tile * turns
        one = ((begin + 1) * programs - 1) // total
        other = ((begin + turns) * programs - 1) // total
        mine = 2 * gl.program_id(0) + (first == begin).to(gl.int32)
        gl.store(partial + mine * SIZE + inside, acc)
        # Every thread's stores come before the one thread's atomic that publishes them.
        gl.thread_barrier()
        complete = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == other - one
        if complete:
            gl.store(arrived + tile, 0)
            acc = gl.load(partial + (2 * one + 1) * SIZE + inside, cache_modifier=".cg")
            for part in range(one + 1, other + 1):
                acc += gl.load(partial + 2 * part * SIZE + inside, cache_modifier=".cg")
    return acc, complete


@gluon.jit
def store_tile(
    acc, tile, w_scale, x_scale, bias, residual, out, num_rows, num_features,
    SCALED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    FEATURES: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    feature = tile * FEATURES + gl.arange(0, FEATURES, layout=gl.SliceLayout(1, STORED))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    target = row[None, :] * num_features + feature[:, None]
    real = feature < num_features
    stores = real[:, None] & (row < num_rows)[None, :]
    # Sums that nothing is added to or multiplied with are exchanged between threads in the narrow output type.
    result = gl.convert_layout(acc if SCALED or BIAS or RESIDUAL else acc.to(out.dtype.element_ty), STORED)
    if SCALED:
        result = result * gl.load(w_scale + feature, mask=real, other=0.0)[:, None]
        result = result * gl.load(x_scale + row, mask=row < num_rows, other=0.0)[None, :]
    if BIAS:
        result += gl.load(bias + feature, mask=real, other=0.0).to(gl.float32)[:, None]
    if RESIDUAL:
        result += gl.load(residual + target, mask=stores, other=0.0).to(gl.float32)
    gl.store(out + target, result.to(out.dtype.element_ty), mask=stores)


@gluon.jit(do_not_specialize=["num_rows"])
def prefetch_kernel(
    weight,
    x,
    w_scale,
    x_scale,
    bias,
    residual,
    out,
    partial,
    arrived,
    num_rows,
    num_features,
    turns,
    STAGES: gl.constexpr,
    TILES: gl.constexpr,
    SLABS: gl.constexpr,
    ROWS: gl.constexpr,
    BOXES: gl.constexpr,
    SCALED: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    SUMS: gl.constexpr,
    STORED: gl.constexpr,
):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * SLABS * TILES, FEATURES, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * SLABS, ROWS, WIDTH], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    total = (num_features + TILES * FEATURES - 1) // (TILES * FEATURES) * turns
    begin = gl.program_id(0) * total // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    gl.warp_specialize(
        [
            (
                _multiply,
                (w_ring, x_ring, full, free, w_scale, x_scale, bias, residual, out, partial, arrived, num_rows,
                 num_features, begin, end, turns, total, STAGES, TILES, SLABS, SCALED, BIAS, RESIDUAL, PDL, SUMS,
                 STORED),
            ),
            (load_turns, (weight, x, w_ring, x_ring, full, free, begin, end, turns, STAGES, TILES, SLABS, BOXES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip
