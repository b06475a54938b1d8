"""The kernel of `fixed_prefetch`, in Gluon: `prefetch_kernel` with sums that end where slices end.

A unit is a run of RUN slices of one tile (64 output features); its sum is a node of the tree. Every program has some
whole units. Where a tile has several units, whichever program finishes its last one adds the nodes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton import slice_tree
from quire.kernels.triton.prefetch_kernel import load_turns, multiply_turn, store_tile, waited

count_slice = gluon.jit(slice_tree.count_slice.fn)
total_of = gluon.jit(slice_tree.total_of.fn)


@gluon.jit
def _sum_slice(w_ring, x_ring, full, free, done, STAGES: gl.constexpr, SLABS: gl.constexpr, SLICE: gl.constexpr,
               SUMS: gl.constexpr):  # fmt: skip
    """The sum of one slice, from zero; `done` turns of this program came before it."""
    FEATURES: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    sums = (gl.zeros((FEATURES, ROWS), gl.float32, SUMS),)
    for turn in range(done, done + SLICE):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        sums = multiply_turn(w_ring, x_ring, stage, sums, 1, SLABS)
        mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), pred=turn > done)
    sums = waited(sums, 0, 1)
    mbarrier.arrive(free.index((done + SLICE - 1) % STAGES))
    return sums[0]


@gluon.jit
def whole_sum(acc, unit, partial, arrived, PARTS: gl.constexpr, LAST: gl.constexpr):
    """(the tile's sum, whether this program has it): the nodes of all its units, added in the tree."""
    FEATURES: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = FEATURES * ROWS
    feature = gl.arange(0, FEATURES, layout=gl.SliceLayout(1, acc.type.layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, acc.type.layout))
    inside = feature[:, None] * ROWS + row[None, :]
    gl.store(partial + unit * SIZE + inside, acc)
    # Every thread's stores come before the one thread's atomic that publishes them.
    gl.thread_barrier()
    tile = unit // PARTS
    complete = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
    if complete:
        gl.store(arrived + tile, 0)
        zero = gl.zeros_like(acc)
        c0, c1, c2, c3, c4, c5, c6, c7 = zero, zero, zero, zero, zero, zero, zero, zero
        for part in gl.static_range(PARTS):
            node = gl.load(partial + (tile * PARTS + part) * SIZE + inside, cache_modifier=".cg")
            c0, c1, c2, c3, c4, c5, c6, c7 = count_slice(node, part, LAST, c0, c1, c2, c3, c4, c5, c6, c7)
        acc = total_of(PARTS, c0, c1, c2, c3, c4, c5, c6, c7)
    return acc, complete


@gluon.jit
def _multiply_units(
    w_ring, x_ring, full, free, bias, residual, out, partial, arrived, num_rows, num_features, first, last,
    STAGES: gl.constexpr, SLABS: gl.constexpr, SLICE: gl.constexpr, RUN: gl.constexpr, RUN_LAST: gl.constexpr,
    PARTS: gl.constexpr, PARTS_LAST: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    SUMS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: one unit after another, each turn as soon as it is loaded."""
    FEATURES: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = x_ring.shape[1]
    if PDL:
        gdc_wait()
    for unit in range(first, last):
        done = (unit - first) * RUN * SLICE
        if RUN == 1:
            acc = _sum_slice(w_ring, x_ring, full, free, done, STAGES, SLABS, SLICE, SUMS)
        else:
            zero = gl.zeros((FEATURES, ROWS), gl.float32, SUMS)
            c0, c1, c2, c3, c4, c5, c6, c7 = zero, zero, zero, zero, zero, zero, zero, zero
            for turn in gl.static_range(RUN):
                acc = _sum_slice(w_ring, x_ring, full, free, done + turn * SLICE, STAGES, SLABS, SLICE, SUMS)
                c0, c1, c2, c3, c4, c5, c6, c7 = count_slice(acc, turn, RUN_LAST, c0, c1, c2, c3, c4, c5, c6, c7)
            acc = total_of(RUN, c0, c1, c2, c3, c4, c5, c6, c7)
        if PARTS == 1:
            store_tile(acc, unit, out, out, bias, residual, out, num_rows, num_features, False, BIAS, RESIDUAL, STORED)
        else:
            acc, complete = whole_sum(acc, unit, partial, arrived, PARTS, PARTS_LAST)
            if complete:
                store_tile(acc, unit // PARTS, out, out, bias, residual, out, num_rows, num_features, False, BIAS,
                           RESIDUAL, STORED)


@gluon.jit(do_not_specialize=["num_rows"])
def fixed_prefetch_kernel(
    weight,
    x,
    bias,
    residual,
    out,
    partial,
    arrived,
    num_rows,
    num_features,
    num_units,
    STAGES: gl.constexpr,
    SLABS: gl.constexpr,
    SLICE: gl.constexpr,  # turns of a slice
    RUN: gl.constexpr,  # slices of a unit, a power of two
    RUN_LAST: gl.constexpr,  # highest place of a counter of so many
    PARTS: gl.constexpr,  # units of a tile
    PARTS_LAST: gl.constexpr,
    ROWS: gl.constexpr,
    BOXES: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    SUMS: gl.constexpr,
    STORED: gl.constexpr,
):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
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
    first = gl.program_id(0) * num_units // gl.num_programs(0)
    last = (gl.program_id(0) + 1) * num_units // gl.num_programs(0)
    UNIT: gl.constexpr = RUN * SLICE
    gl.warp_specialize(
        [
            (
                _multiply_units,
                (w_ring, x_ring, full, free, bias, residual, out, partial, arrived, num_rows, num_features, first,
                 last, STAGES, SLABS, SLICE, RUN, RUN_LAST, PARTS, PARTS_LAST, BIAS, RESIDUAL, PDL, SUMS, STORED),
            ),
            (load_turns, (weight, x, w_ring, x_ring, full, free, first * UNIT, last * UNIT, PARTS * UNIT, STAGES, 1,
                          SLABS, BOXES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip
