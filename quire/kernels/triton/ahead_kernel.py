"""The kernel of `linear_ahead`, in Gluon: Triton's lower layer, since Triton itself cannot say when a copy begins.

A turn is a slab of 64 columns or several: of a tile of the weight and of all rows. Turns are numbered through all tiles
of the weight, and every program has an equal share of them, of at least one; each has a stage of the ring, a barrier
that counts its bytes and one that says that they have been read.
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
def _ask_weights(weight, full, ring, turn, stage, turns, SLABS: gl.constexpr, BYTES: gl.constexpr):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    mbarrier.expect(full.index(stage), BYTES)
    for slab in gl.static_range(SLABS):
        place = [turn // turns * FEATURES, (turn % turns * SLABS + slab) * WIDTH]
        tma.async_copy_global_to_shared(weight, place, full.index(stage), ring.index(stage * SLABS + slab))


@gluon.jit
def _ask_rows(x, full, ring, turn, stage, turns, SLABS: gl.constexpr):
    WIDTH: gl.constexpr = x.block_type.shape[1]
    for slab in gl.static_range(SLABS):
        place = [0, (turn % turns * SLABS + slab) * WIDTH]
        tma.async_copy_global_to_shared(x, place, full.index(stage), ring.index(stage * SLABS + slab))


@gluon.jit
def _load(
    weight, x, w_ring, x_ring, full, free, begin, end, turns,
    STAGES: gl.constexpr, SLABS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp asks for everything: weights at once, rows when the kernel before has ended."""
    BYTES: gl.constexpr = SLABS * (weight.block_type.nbytes + x.block_type.nbytes)
    early = gl.minimum(begin + STAGES, end)
    for turn in range(begin, early):
        _ask_weights(weight, full, w_ring, turn, turn - begin, turns, SLABS, BYTES)
    if PDL:
        gdc_wait()
    for turn in range(begin, early):
        _ask_rows(x, full, x_ring, turn, turn - begin, turns, SLABS)
    for turn in range(early, end):
        done = turn - begin
        stage = done % STAGES
        mbarrier.wait(free.index(stage), done // STAGES - 1 & 1)
        _ask_weights(weight, full, w_ring, turn, stage, turns, SLABS, BYTES)
        _ask_rows(x, full, x_ring, turn, stage, turns, SLABS)


@gluon.jit
def _multiply(
    w_ring, x_ring, full, free, residual, out, partial, arrived, num_rows, num_features, begin, end, turns, total,
    STAGES: gl.constexpr, SLABS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    SUMS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """The other warps multiply what is there, tile after tile."""
    FEATURES: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    if PDL:
        gdc_wait()
    for tile in range(begin // turns, (end + turns - 1) // turns):
        first = gl.maximum(begin, tile * turns)
        last = gl.minimum(end, (tile + 1) * turns)
        acc = gl.zeros((FEATURES, ROWS), gl.float32, SUMS)
        for turn in range(first, last):
            done = turn - begin
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            for slab in gl.static_range(SLABS):
                part = stage * SLABS + slab
                acc = warpgroup_mma(w_ring.index(part), x_ring.index(part).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(SLABS, deps=(acc,))
            # The turn before this one has been read: its place may be filled.
            mbarrier.arrive(free.index((done + STAGES - 1) % STAGES), pred=turn > first)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((last - 1 - begin) % STAGES))
        acc, complete = _whole_tile(acc, tile, first, last, total, gl.num_programs(0), partial, arrived, turns)
        if complete:
            _store_tile(acc, tile, residual, out, num_rows, num_features, RESIDUAL, STORED)


@gluon.jit
def _whole_tile(acc, tile, first, last, total, programs, partial, arrived, turns):
    """(the tile's sum, whether this program has it): at once if it saw all columns, else if it is the last one."""
    FEATURES: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    complete = last - first == turns
    if not complete:
        feature = gl.arange(0, FEATURES, layout=gl.SliceLayout(1, acc.type.layout))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, acc.type.layout))
        inside = feature[:, None] * ROWS + row[None, :]
        SIZE: gl.constexpr = FEATURES * ROWS
        # Shares are equal, so a turn tells its program. Whoever has the first turns of a tile keeps them in its second
        # place, all others in their first: a program has at most one part of either kind.
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
def _store_tile(acc, tile, residual, out, num_rows, num_features, RESIDUAL: gl.constexpr, STORED: gl.constexpr):
    FEATURES: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    feature = tile * FEATURES + gl.arange(0, FEATURES, layout=gl.SliceLayout(1, STORED))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    target = row[None, :] * num_features + feature[:, None]
    stores = (feature < num_features)[:, None] & (row < num_rows)[None, :]
    if RESIDUAL:
        result = gl.convert_layout(acc, STORED)
        result += gl.load(residual + target, mask=stores, other=0.0).to(gl.float32)
        gl.store(out + target, result.to(out.dtype.element_ty), mask=stores)
    else:
        gl.store(out + target, gl.convert_layout(acc.to(out.dtype.element_ty), STORED), mask=stores)


@gluon.jit(do_not_specialize=["num_rows"])
def ahead_kernel(
    weight,
    x,
    residual,
    out,
    partial,
    arrived,
    num_rows,
    num_features,
    turns,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    SUMS: gl.constexpr,
    STORED: gl.constexpr,
):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * SLABS, FEATURES, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * SLABS, ROWS, WIDTH], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    total = (num_features + FEATURES - 1) // FEATURES * turns
    begin = gl.program_id(0) * total // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    gl.warp_specialize(
        [
            (
                _multiply,
                (w_ring, x_ring, full, free, residual, out, partial, arrived, num_rows, num_features, begin, end, turns,
                 total, STAGES, SLABS, RESIDUAL, PDL, SUMS, STORED),
            ),
            (_load, (weight, x, w_ring, x_ring, full, free, begin, end, turns, STAGES, SLABS, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip
