"""The kernel of `linear_ahead`, in Gluon: Triton's lower layer, since Triton itself cannot say when a copy begins.

A turn is one slab of 64 columns: of a tile of the weight and of all rows. Turns are numbered through all tiles of the
weight, and every program has an equal share of them; each has a stage of the ring, and a barrier that counts its bytes.
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
def _ask_weights(weight, ready, ring, turn, stage, asked, turns, BYTES: gl.constexpr):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    mbarrier.expect(ready.index(stage), BYTES, pred=asked)
    place = [turn // turns * FEATURES, turn % turns * WIDTH]
    tma.async_copy_global_to_shared(weight, place, ready.index(stage), ring.index(stage), pred=asked)


@gluon.jit
def _ask_rows(x, ready, ring, turn, stage, asked, turns):
    WIDTH: gl.constexpr = x.block_type.shape[1]
    place = [0, turn % turns * WIDTH]
    tma.async_copy_global_to_shared(x, place, ready.index(stage), ring.index(stage), pred=asked)


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
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    SUMS: gl.constexpr,
    STORED: gl.constexpr,
):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, FEATURES, weight.block_type.shape[1]], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, x.block_type.shape[1]], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    programs = gl.num_programs(0)
    total = (num_features + FEATURES - 1) // FEATURES * turns
    begin = gl.program_id(0) * total // programs
    end = (gl.program_id(0) + 1) * total // programs
    for stage in gl.static_range(STAGES):
        _ask_weights(weight, ready, w_ring, begin + stage, stage, begin + stage < end, turns, BYTES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _ask_rows(x, ready, x_ring, begin + stage, stage, begin + stage < end, turns)
    for tile in range(begin // turns, (end + turns - 1) // turns):
        first = gl.maximum(begin, tile * turns)
        last = gl.minimum(end, (tile + 1) * turns)
        acc = gl.zeros((FEATURES, ROWS), gl.float32, SUMS)
        for turn in range(first, last):
            done = turn - begin
            full = done % STAGES
            mbarrier.wait(ready.index(full), done // STAGES & 1)
            acc = warpgroup_mma(w_ring.index(full), x_ring.index(full).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The turn before this one has been read: its place may be filled.
            after = turn - 1 + STAGES
            asked = (done > 0) & (after < end)
            free = (done + STAGES - 1) % STAGES
            _ask_weights(weight, ready, w_ring, after, free, asked, turns, BYTES)
            _ask_rows(x, ready, x_ring, after, free, asked, turns)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc, complete = _whole_tile(acc, tile, first, last, total, programs, partial, arrived, turns)
        if complete:
            _store_tile(acc, tile, residual, out, num_rows, num_features, RESIDUAL, STORED)
