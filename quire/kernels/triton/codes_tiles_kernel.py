"""The kernel of `codes_tiles`, in Gluon: GEMMs of many rows by a weight of 4-bit codes, bound by the tensor cores.

A tile is some features by up to 256 rows. One warp loads turns of columns (codes, their scales, rows) into a ring; two
or three warp groups multiply, each its own features. The weight is the first operand, in registers: a warp group makes
that of the next columns while the tensor cores work on those before, and when it waits for them the other groups keep
them busy. So no group waits for another, and what is made of codes costs nothing but instructions that have room.

Programs have equal shares of all turns. Where a share ends inside a tile each warp group puts its sums away, four
numbers of a thread side by side, and the last one to come adds them up, in the order of the columns.
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

from quire.kernels.triton.codes_kernel import codes_operand, scaled_codes

_COLUMNS = gl.constexpr(64)
"""Of a slab, of which a turn has two."""
_STORED_ROWS = gl.constexpr(32)
"""Rows that threads exchange at a time before they are stored: the ring leaves little shared memory."""


@gluon.jit
def _load_codes(
    weight, scales, w_ring, s_ring, full, stage, turn, turns, tiles, num_features, GROUPS: gl.constexpr,
    RUNS: gl.constexpr, GROUP_COLUMNS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Codes and scales of a turn: a block of each slab and one of each run, for every warp group."""
    HEIGHT: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    FEATURES: gl.constexpr = scales.block_type.shape[0]
    block = turn // turns % tiles * GROUPS
    slab = turn % turns * 2
    mbarrier.expect(full.index(stage), BYTES)
    for each in gl.static_range(2 * GROUPS):
        place = [(block + each % GROUPS) * HEIGHT, (slab + each // GROUPS) * WIDTH]
        target = w_ring.index(stage * (2 * GROUPS) + each)
        tma.async_copy_global_to_shared(weight, place, full.index(stage), target)
    for each in gl.static_range(RUNS * GROUPS):
        scale = (slab * _COLUMNS + each // GROUPS * (2 * _COLUMNS // RUNS)) // GROUP_COLUMNS
        where = [scale * num_features + (block + each % GROUPS) * FEATURES]
        tma.async_copy_global_to_shared(
            scales, where, full.index(stage), s_ring.index(stage * (RUNS * GROUPS) + each))


@gluon.jit
def _load_rows(x, x_ring, full, stage, turn, turns, tiles):
    ROWS: gl.constexpr = x.block_type.shape[0]
    row = turn // turns // tiles * ROWS
    for slab in gl.static_range(2):
        place = [row, (turn % turns * 2 + slab) * _COLUMNS]
        tma.async_copy_global_to_shared(x, place, full.index(stage), x_ring.index(2 * stage + slab))


@gluon.jit
def _load_turns(
    sources, STAGES: gl.constexpr, GROUPS: gl.constexpr, RUNS: gl.constexpr,
    GROUP_COLUMNS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: prefetches codes at once, loads rows when the previous kernel has ended."""
    weight, x, scales, w_ring, x_ring, s_ring, full, free, num_features, begin, end, turns, tiles = sources
    CODES: gl.constexpr = GROUPS * (2 * weight.block_type.nbytes + RUNS * scales.block_type.nbytes)
    BYTES: gl.constexpr = CODES + 2 * x.block_type.nbytes
    early = gl.minimum(begin + STAGES, end)
    for turn in range(begin, early):
        _load_codes(weight, scales, w_ring, s_ring, full, turn - begin, turn, turns, tiles, num_features, GROUPS, RUNS,
                    GROUP_COLUMNS, BYTES)  # fmt: skip
    if PDL:
        gdc_wait()
    for turn in range(begin, early):
        _load_rows(x, x_ring, full, turn - begin, turn, turns, tiles)
    for turn in range(early, end):
        done = turn - begin
        stage = done % STAGES
        mbarrier.wait(free.index(stage), done // STAGES - 1 & 1)
        _load_codes(weight, scales, w_ring, s_ring, full, stage, turn, turns, tiles, num_features, GROUPS, RUNS,
                    GROUP_COLUMNS, BYTES)  # fmt: skip
        _load_rows(x, x_ring, full, stage, turn, turns, tiles)


@gluon.jit
def _operand(
    w_ring, s_ring, stage, SLAB: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, RUNS: gl.constexpr,
    KIND: gl.constexpr, WORDS: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """[features, 64]: the weights of a warp group and a slab."""
    words = w_ring.index((2 * stage + SLAB) * GROUPS + GROUP).load(WORDS)
    scales = s_ring.index((stage * RUNS + SLAB * RUNS // 2) * GROUPS + GROUP).load(gl.SliceLayout(1, OPERAND))
    return scaled_codes(codes_operand(words, _COLUMNS, KIND, OPERAND), scales)


@gluon.jit
def _whole_sum(
    sums, tile, first, last, turns, total, partial, arrived, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    SUMS: gl.constexpr, FLAT: gl.constexpr,
):  # fmt: skip
    """(a warp group's sums of a tile, whether it has them): at once if it saw all columns, else if it is the last."""
    FEATURES: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    SIZE: gl.constexpr = FEATURES * ROWS
    complete = last - first == turns
    if not complete:
        # Four numbers of a thread are neighbours, and so are the threads of a warp.
        parts = sums.reshape([FEATURES // 16, 2, 8, ROWS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
        flat = gl.convert_layout(parts.reshape([SIZE]), FLAT, assert_trivial=True)
        place = gl.arange(0, SIZE, layout=FLAT)
        # Shares are equal, so a turn's number gives its program. A program has room for two parts: the second is for a
        # tile whose first turns it has, the first for any other tile. It has at most one of either kind.
        programs = gl.num_programs(0)
        one = ((tile * turns + 1) * programs - 1) // total
        other = ((tile * turns + turns) * programs - 1) // total
        mine = 2 * gl.program_id(0) + (first == tile * turns).to(gl.int32)
        gl.store(partial + (mine * GROUPS + GROUP) * SIZE + place, flat)
        # Every thread's stores come before the one thread's atomic that publishes them.
        gl.thread_barrier()
        counter = arrived + (tile * GROUPS + GROUP)
        complete = gl.atomic_add(counter, 1, sem="acq_rel") == other - one
        if complete:
            gl.store(counter, 0)
            if other - one == 1:  # The sum of two does not depend on their order: one's own is at hand.
                theirs = 2 * one + 1 + mine % 2
                flat += gl.load(partial + (theirs * GROUPS + GROUP) * SIZE + place, cache_modifier=".cg")
            else:
                flat = gl.load(partial + ((2 * one + 1) * GROUPS + GROUP) * SIZE + place, cache_modifier=".cg")
                for part in range(one + 1, other + 1):
                    flat += gl.load(partial + (2 * part * GROUPS + GROUP) * SIZE + place, cache_modifier=".cg")
        parts = flat.reshape([ROWS // 8, FEATURES // 16, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
        sums = gl.convert_layout(parts.reshape([FEATURES, ROWS]), SUMS, assert_trivial=True)
    return sums, complete


@gluon.jit
def _store_rows(
    sums, feature, row, bias, residual, out, num_rows, num_features, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """Sums [features, rows] to out [rows, features], with bias and residual."""
    features = feature + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, STORED))
    rows = row + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, STORED))
    target = rows[None, :] * num_features + features[:, None]
    real = features < num_features
    stores = real[:, None] & (rows < num_rows)[None, :]
    # Sums that nothing is added to are exchanged between threads in the narrow output type.
    result = gl.convert_layout(sums if BIAS or RESIDUAL else sums.to(out.dtype.element_ty), STORED)
    if BIAS:
        result += gl.load(bias + features, mask=real, other=0.0).to(gl.float32)[:, None]
    if RESIDUAL:
        result += gl.load(residual + target, mask=stores, other=0.0).to(gl.float32)
    gl.store(out + target, result.to(out.dtype.element_ty), mask=stores)


@gluon.jit
def _store_tile(
    sums, feature, row, bias, residual, out, num_rows, num_features, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """A few rows at a time: halves of halves, which are other registers of the same threads."""
    FEATURES: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    if ROWS > _STORED_ROWS:
        low, high = gl.split(sums.reshape([FEATURES, 2, ROWS // 2]).permute([0, 2, 1]))
        _store_tile(low, feature, row, bias, residual, out, num_rows, num_features, BIAS, RESIDUAL, STORED)
        _store_tile(high, feature, row + ROWS // 2, bias, residual, out, num_rows, num_features, BIAS, RESIDUAL, STORED)
    else:
        _store_rows(sums, feature, row, bias, residual, out, num_rows, num_features, BIAS, RESIDUAL, STORED)


@gluon.jit
def _multiply_turns(
    given, GROUP: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, RUNS: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr, LAYOUTS: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: its features of one tile after another."""
    (w_ring, x_ring, s_ring, full, free, bias, residual, out, partial, arrived, num_rows, num_features, begin, end,
     turns, tiles, total) = given  # fmt: skip
    WORDS: gl.constexpr = LAYOUTS[0]
    SUMS: gl.constexpr = LAYOUTS[1]
    FLAT: gl.constexpr = LAYOUTS[2]
    STORED: gl.constexpr = LAYOUTS[3]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    KIND: gl.constexpr = x_ring.dtype
    ROWS: gl.constexpr = x_ring.shape[1]
    FEATURES: gl.constexpr = s_ring.shape[1]
    if PDL:
        gdc_wait()
    for tile in range(begin // turns, (end + turns - 1) // turns):
        first = gl.maximum(begin, tile * turns)
        last = gl.minimum(end, (tile + 1) * turns)
        sums = gl.zeros((FEATURES, ROWS), gl.float32, SUMS)
        for turn in range(first, last):
            done = turn - begin
            stage = done % STAGES
            mbarrier.wait(full.index(stage), done // STAGES & 1)
            low = _operand(w_ring, s_ring, stage, 0, GROUP, GROUPS, RUNS, KIND, WORDS, OPERAND)
            sums = warpgroup_mma(low, x_ring.index(2 * stage).permute((1, 0)), sums, is_async=True)
            # Made while the tensor cores work on the first slab. That of the next turn is made when they are done: were
            # an operand still in use where the loop begins again, the assembler would make every MMA wait.
            high = _operand(w_ring, s_ring, stage, 1, GROUP, GROUPS, RUNS, KIND, WORDS, OPERAND)
            sums = warpgroup_mma(high, x_ring.index(2 * stage + 1).permute((1, 0)), sums, is_async=True)
            sums, low, high = warpgroup_mma_wait(0, deps=(sums, low, high))
            mbarrier.arrive(free.index(stage))
        sums, complete = _whole_sum(
            sums, tile, first, last, turns, total, partial, arrived, GROUP, GROUPS, SUMS, FLAT)
        if complete:
            _store_tile(sums, (tile % tiles * GROUPS + GROUP) * FEATURES, tile // tiles * ROWS, bias, residual, out,
                        num_rows, num_features, BIAS, RESIDUAL, STORED)


@gluon.jit(do_not_specialize=["num_rows", "turns", "tiles", "total"])
def codes_tiles_kernel(
    weight, x, scales, bias, residual, out, partial, arrived, num_rows, num_features, turns, tiles, total,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, RUNS: gl.constexpr, GROUP_COLUMNS: gl.constexpr,
    REGISTERS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    LAYOUTS: gl.constexpr,
):  # fmt: skip
    """`weight`: a descriptor of int32 words, a block for each warp group and slab; `scales`: one of int32 [groups *
    features], a scale in the low half and an offset in the high half of each. `turns` of a tile, `tiles` of all
    features, `total` turns of all tiles."""
    HEIGHT: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    FEATURES: gl.constexpr = scales.block_type.shape[0]
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * 2 * GROUPS, HEIGHT, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * 2, x.block_type.shape[0], _COLUMNS], x.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [STAGES * RUNS * GROUPS, FEATURES], scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    begin = gl.program_id(0) * total // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * total // gl.num_programs(0)
    given = (w_ring, x_ring, s_ring, full, free, bias, residual, out, partial, arrived, num_rows, num_features, begin,
             end, turns, tiles, total)  # fmt: skip
    sources = (weight, x, scales, w_ring, x_ring, s_ring, full, free, num_features, begin, end, turns, tiles)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_turns, (given, 0, STAGES, GROUPS, RUNS, BIAS, RESIDUAL, PDL, LAYOUTS)),
                (_multiply_turns, (given, 1, STAGES, GROUPS, RUNS, BIAS, RESIDUAL, PDL, LAYOUTS)),
                (_load_turns, (sources, STAGES, GROUPS, RUNS, GROUP_COLUMNS, PDL)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_turns, (given, 0, STAGES, GROUPS, RUNS, BIAS, RESIDUAL, PDL, LAYOUTS)),
                (_multiply_turns, (given, 1, STAGES, GROUPS, RUNS, BIAS, RESIDUAL, PDL, LAYOUTS)),
                (_multiply_turns, (given, 2, STAGES, GROUPS, RUNS, BIAS, RESIDUAL, PDL, LAYOUTS)),
                (_load_turns, (sources, STAGES, GROUPS, RUNS, GROUP_COLUMNS, PDL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
