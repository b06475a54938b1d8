"""The kernel of `fixed_tiles`, in Gluon: many rows, sums that end where slices end.

A tile is 128 rows by 128 or 256 features. One warp loads turns of 64 columns into a ring; two warp groups multiply 64
rows each, so that one adds up its slices while the other multiplies. A unit is a run of slices of one tile, and its sum
is a node of the tree. Programs take units one after another.

**Where the tree is kept.** The sums of a warp group take 64 registers of each thread (128 features). Four slices add up
in three such blocks: the sum that grows, and two that wait. The sums of four slices wait in shared memory, those of
eight and more in memory of the program's own, which stays in the L2 cache: the longer a sum is, the more rarely it is
put away.

**Turns in order.** A slice of one head is only two turns long. If both warp groups end it at once, the tensor cores
rest while both add. With ORDERED one group begins its slice when the other has issued all of its own.
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

from quire.kernels.triton.fixed_prefetch_kernel import whole_sum


@gluon.jit
def _corner(tile, num_rows, num_features, ROWS: gl.constexpr, FEATURES: gl.constexpr, BAND: gl.constexpr):
    """First row and feature of a tile. Bands of row tiles share the weight's tiles in the L2 cache."""
    tiles_m = (num_rows + 2 * ROWS - 1) // (2 * ROWS)
    tiles_n = (num_features + FEATURES - 1) // FEATURES
    band = tile // (BAND * tiles_n)
    height = gl.minimum(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * tiles_n)
    return (band * BAND + inside % height) * (2 * ROWS), inside // height * FEATURES


@gluon.jit
def _load_weight(weight, w_ring, full, stage, feature, column, BYTES: gl.constexpr):
    mbarrier.expect(full.index(stage), BYTES)
    tma.async_copy_global_to_shared(weight, [feature, column], full.index(stage), w_ring.index(stage))


@gluon.jit
def _load_rows(x, x_ring, full, stage, row, column):
    ROWS: gl.constexpr = x.block_type.shape[0]
    for group in gl.static_range(2):
        place = [row + group * ROWS, column]
        tma.async_copy_global_to_shared(x, place, full.index(stage), x_ring.index(2 * stage + group))


@gluon.jit
def _load_units(
    weight, x, w_ring, x_ring, full, free, num_rows, num_features, num_units, STAGES: gl.constexpr,
    UNIT: gl.constexpr, PARTS: gl.constexpr, BAND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: fills the ring with weights at once, loads rows when the previous kernel has ended."""
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = weight.block_type.nbytes + 2 * x.block_type.nbytes
    EARLY: gl.constexpr = STAGES if STAGES < UNIT else UNIT
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    row, feature = _corner(program // PARTS, num_rows, num_features, ROWS, FEATURES, BAND)
    first = program % PARTS * UNIT
    for turn in range(EARLY):
        _load_weight(weight, w_ring, full, turn, feature, (first + turn) * WIDTH, BYTES)
    if PDL:
        gdc_wait()
    for turn in range(EARLY):
        _load_rows(x, x_ring, full, turn, row, (first + turn) * WIDTH)
    # All turns of the program, of which the first EARLY are on their way.
    total = (num_units - program + programs - 1) // programs * UNIT
    for done in range(EARLY, total):
        unit = program + done // UNIT * programs
        row, feature = _corner(unit // PARTS, num_rows, num_features, ROWS, FEATURES, BAND)
        column = (unit % PARTS * UNIT + done % UNIT) * WIDTH
        stage = done % STAGES
        # A ring's first round finds every place free.
        mbarrier.wait(free.index(stage), (done // STAGES + 1) & 1)
        _load_weight(weight, w_ring, full, stage, feature, column, BYTES)
        _load_rows(x, x_ring, full, stage, row, column)


@gluon.jit
def _multiply_turn(w_ring, x_ring, turn, acc, adds, GROUP: gl.constexpr, STAGES: gl.constexpr):
    stage = turn % STAGES
    rows = x_ring.index(2 * stage + GROUP)
    return warpgroup_mma(rows, w_ring.index(stage).permute((1, 0)), acc, use_acc=adds, is_async=True)


@gluon.jit
def _sum_slice(
    w_ring, x_ring, full, free, tokens, done, GROUP: gl.constexpr, STAGES: gl.constexpr, SLICE: gl.constexpr,
    ORDERED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The sum of one slice, from zero; `done` turns of this program came before it."""
    ROWS: gl.constexpr = x_ring.shape[1]
    FEATURES: gl.constexpr = w_ring.shape[1]
    acc = gl.zeros((ROWS, FEATURES), gl.float32, SUMS)
    if ORDERED:
        # The second group follows the first one in the same slice, the first the second one in the slice before.
        mbarrier.wait(tokens.index(GROUP), (done // SLICE + 1 - GROUP) & 1)
        # Nothing may come between the instructions, or the assembler makes each wait for the one before.
        for turn in gl.static_range(SLICE):
            mbarrier.wait(full.index((done + turn) % STAGES), (done + turn) // STAGES & 1)
        for turn in gl.static_range(SLICE):
            acc = _multiply_turn(w_ring, x_ring, done + turn, acc, turn > 0, GROUP, STAGES)
        mbarrier.arrive(tokens.index(1 - GROUP))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        for turn in gl.static_range(SLICE):
            mbarrier.arrive(free.index((done + turn) % STAGES))
    else:
        for turn in range(done, done + SLICE):
            mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
            acc = _multiply_turn(w_ring, x_ring, turn, acc, turn > done, GROUP, STAGES)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The turn before this one has been read: its stage may be filled again.
            mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), pred=turn > done)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((done + SLICE - 1) % STAGES))
    return acc


@gluon.jit
def _sum_group(
    w_ring, x_ring, full, free, tokens, done, GROUP: gl.constexpr, STAGES: gl.constexpr, SLICE: gl.constexpr,
    INNER: gl.constexpr, ORDERED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The node over INNER slices: 1, 2 or 4 of them."""
    value = _sum_slice(w_ring, x_ring, full, free, tokens, done, GROUP, STAGES, SLICE, ORDERED, SUMS)
    if INNER > 1:
        value = value + _sum_slice(
            w_ring, x_ring, full, free, tokens, done + SLICE, GROUP, STAGES, SLICE, ORDERED, SUMS)
    if INNER > 2:
        right = _sum_slice(w_ring, x_ring, full, free, tokens, done + 2 * SLICE, GROUP, STAGES, SLICE, ORDERED, SUMS)
        right = right + _sum_slice(
            w_ring, x_ring, full, free, tokens, done + 3 * SLICE, GROUP, STAGES, SLICE, ORDERED, SUMS)
        value = value + right
    return value


@gluon.jit
def _merge(value, group, kept, deep, inside, GROUPS: gl.constexpr, PLACES: gl.constexpr, SUMS: gl.constexpr):
    """Put the sum of a group of slices into a binary counter, whose first place is in shared memory. The last group's
    sum is added to all that wait: the smallest first, as the tree has it."""
    SIZE: gl.constexpr = value.shape[0] * value.shape[1]
    for place in gl.static_range(PLACES):
        taken = (group >> place) & 1
        last = group == GROUPS - 1
        comes = ((group + 1) & ((1 << place) - 1)) == 0  # all places below were taken
        if (taken == 1) & (comes | last):
            if place == 0:
                value = kept.load(SUMS) + value
            else:
                value = gl.load(deep + (place - 1) * SIZE + inside) + value
        if (taken == 0) & comes & (group < GROUPS - 1):
            if place == 0:
                kept.store(value)
            else:
                gl.store(deep + (place - 1) * SIZE + inside, value)
    return value


@gluon.jit
def _store_rows(
    acc, kept, row, feature, bias, residual, out, num_rows, num_features, PLACES: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """Bias and residual are added where the sums lie. Then threads exchange the result, through the place where a sum
    has waited if there is one: no other memory is left beside the ring."""
    ROWS: gl.constexpr = acc.shape[0]
    FEATURES: gl.constexpr = acc.shape[1]
    if BIAS or RESIDUAL:
        mine = feature + gl.arange(0, FEATURES, layout=gl.SliceLayout(0, acc.type.layout))
        place = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
        if BIAS:
            acc = acc + gl.load(bias + mine, mask=mine < num_features, other=0.0).to(gl.float32)[None, :]
        if RESIDUAL:
            source = place.to(gl.int64)[:, None] * num_features + mine[None, :]
            known = (place < num_rows)[:, None] & (mine < num_features)[None, :]
            acc = acc + gl.load(residual + source, mask=known, other=0.0).to(gl.float32)
    if PLACES:
        kept.store(acc)
        result = kept.load(STORED).to(out.dtype.element_ty)
    else:
        result = gl.convert_layout(acc.to(out.dtype.element_ty), STORED)
    features = feature + gl.arange(0, FEATURES, layout=gl.SliceLayout(0, STORED))
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
    target = rows.to(gl.int64)[:, None] * num_features + features[None, :]
    gl.store(out + target, result, mask=(rows < num_rows)[:, None] & (features < num_features)[None, :])


@gluon.jit
def _multiply_units(
    w_ring, x_ring, full, free, tokens, kept, bias, residual, out, partial, arrived, deep, num_rows, num_features,
    num_units, GROUP: gl.constexpr, STAGES: gl.constexpr, SLICE: gl.constexpr, INNER: gl.constexpr,
    GROUPS: gl.constexpr, PLACES: gl.constexpr, PARTS: gl.constexpr, PARTS_LAST: gl.constexpr, BAND: gl.constexpr,
    ORDERED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr, SUMS: gl.constexpr,
    STORED: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group: its half of one unit after another."""
    ROWS: gl.constexpr = x_ring.shape[1]
    FEATURES: gl.constexpr = w_ring.shape[1]
    UNIT: gl.constexpr = GROUPS * INNER * SLICE
    program = gl.program_id(0)
    if PDL:
        gdc_wait()
    for unit in range(program, num_units, gl.num_programs(0)):
        done = (unit - program) // gl.num_programs(0) * UNIT
        if GROUPS == 1:
            acc = _sum_group(
                w_ring, x_ring, full, free, tokens, done, GROUP, STAGES, SLICE, INNER, ORDERED, SUMS)
        else:
            feature = gl.arange(0, FEATURES, layout=gl.SliceLayout(0, SUMS))
            place = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
            inside = place[:, None] * FEATURES + feature[None, :]
            own = deep + (2 * program + GROUP) * ((PLACES - 1) * ROWS * FEATURES)
            acc = gl.zeros((ROWS, FEATURES), gl.float32, SUMS)
            for group in range(GROUPS):
                acc = _sum_group(
                    w_ring, x_ring, full, free, tokens, done + group * (INNER * SLICE), GROUP, STAGES, SLICE, INNER,
                    ORDERED, SUMS)
                acc = _merge(acc, group, kept, own, inside, GROUPS, PLACES, SUMS)
        tile = unit // PARTS
        row, feature = _corner(tile, num_rows, num_features, ROWS, FEATURES, BAND)
        if PARTS == 1:
            _store_rows(acc, kept, row + GROUP * ROWS, feature, bias, residual, out, num_rows, num_features, PLACES,
                        BIAS, RESIDUAL, STORED)
        else:
            acc, complete = whole_sum(
                acc, (2 * tile + GROUP) * PARTS + unit % PARTS, partial, arrived, PARTS, PARTS_LAST)
            if complete:
                _store_rows(acc, kept, row + GROUP * ROWS, feature, bias, residual, out, num_rows, num_features, PLACES,
                            BIAS, RESIDUAL, STORED)


@gluon.jit(do_not_specialize=["num_rows", "num_units"])
def fixed_tiles_kernel(
    weight,
    x,
    bias,
    residual,
    out,
    partial,
    arrived,
    deep,
    num_rows,
    num_features,
    num_units,
    STAGES: gl.constexpr,
    SLICE: gl.constexpr,  # turns of a slice
    INNER: gl.constexpr,  # slices that add up in registers: 1, 2 or 4
    GROUPS: gl.constexpr,  # of so many slices each, in a unit
    PLACES: gl.constexpr,  # of sums of groups that wait
    PARTS: gl.constexpr,  # units of a tile
    PARTS_LAST: gl.constexpr,
    BAND: gl.constexpr,
    ORDERED: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    REGISTERS: gl.constexpr,
    SUMS: gl.constexpr,
    STORED: gl.constexpr,
    KEPT: gl.constexpr,
):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, FEATURES, WIDTH], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, WIDTH], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tokens = full
    if ORDERED:  # else nobody waits for them, and to the compiler their place would be free (hopper_prefill_kernel)
        tokens = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(2):
            mbarrier.init(tokens.index(group), count=1)
    kept, other = full, full
    if PLACES:
        waiting = gl.allocate_shared_memory(gl.float32, [2, ROWS, FEATURES], KEPT)
        kept, other = waiting.index(0), waiting.index(1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _multiply_units,
                (w_ring, x_ring, full, free, tokens, kept, bias, residual, out, partial, arrived, deep, num_rows,
                 num_features, num_units, 0, STAGES, SLICE, INNER, GROUPS, PLACES, PARTS, PARTS_LAST, BAND, ORDERED,
                 BIAS, RESIDUAL, PDL, SUMS, STORED),
            ),
            (
                _multiply_units,
                (w_ring, x_ring, full, free, tokens, other, bias, residual, out, partial, arrived, deep, num_rows,
                 num_features, num_units, 1, STAGES, SLICE, INNER, GROUPS, PLACES, PARTS, PARTS_LAST, BAND, ORDERED,
                 BIAS, RESIDUAL, PDL, SUMS, STORED),
            ),
            (_load_units, (weight, x, w_ring, x_ring, full, free, num_rows, num_features, num_units, STAGES,
                           GROUPS * INNER * SLICE, PARTS, BAND, PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
