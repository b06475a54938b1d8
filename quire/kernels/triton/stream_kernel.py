"""The kernel of `linear_stream`, in Gluon: up to 16 rows times a weight that goes from memory straight to registers.

A program owns some output features; its warps share the columns, a run of them at a time. Weights come to registers as
the tensor cores' first operand, the first of them before the kernel before has ended; the rows are the columns of the
second. So there is no ring to fill and nothing that other programs have to add: at its end a program adds its warps'
sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.activation import activate


@gluon.jit
def _columns(turn: gl.constexpr, OTHER: gl.constexpr, AXIS: gl.constexpr, WARPS: gl.constexpr, RUN: gl.constexpr,
             LAYOUT: gl.constexpr):  # fmt: skip
    """[warps, columns] of a turn, in a slice of an operand's layout without dimension OTHER; AXIS: where columns are
    in what is left."""
    LEFT: gl.constexpr = gl.SliceLayout(OTHER, LAYOUT)
    warp = gl.arange(0, WARPS, gl.SliceLayout(AXIS, LEFT))
    column = gl.arange(0, RUN, gl.SliceLayout(0, LEFT))
    return turn * (WARPS * RUN) + warp[:, None] * RUN + column[None, :]


@gluon.jit
def _load_weights(
    weight, tiles, unit: gl.constexpr, TURNS: gl.constexpr, NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr,
    FEATURES: gl.constexpr, HALVES: gl.constexpr, WARPS: gl.constexpr, RUN: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """[warps, features, columns] of one turn of one of a program's tiles. With a gate the second half of the features
    is of the weight's second half."""
    FIRST: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    tile = gl.program_id(0)
    if unit >= TURNS:  # A step that the program does not have reads the last tile and stores nothing.
        tile = gl.minimum(tile + unit // TURNS * gl.num_programs(0), tiles - 1)
    row = gl.arange(0, FEATURES * HALVES, gl.SliceLayout(0, gl.SliceLayout(2, FIRST)))
    feature = tile * FEATURES + row % FEATURES
    if NUM_FEATURES % FEATURES:
        feature = gl.minimum(feature, NUM_FEATURES - 1)
    line = (feature + row // FEATURES * NUM_FEATURES).to(gl.int64) * WIDTH
    place = line[None, :, None] + _columns(unit % TURNS, 1, 1, WARPS, RUN, FIRST)[:, None, :]
    return gl.load(weight + place, eviction_policy="evict_first")


@gluon.jit
def _load_rows(x, stride, num_rows, turn: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, RUN: gl.constexpr,
               SUMS: gl.constexpr):  # fmt: skip
    """[warps, columns, rows]: as the tensor cores' second operand."""
    SECOND: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, SECOND)))[None, None, :]
    place = row * stride + _columns(turn, 2, 1, WARPS, RUN, SECOND)[:, :, None]
    return gl.load(x + place, mask=row < num_rows, other=0.0)


@gluon.jit
def _load_gain(gain, turn: gl.constexpr, WARPS: gl.constexpr, RUN: gl.constexpr, SUMS: gl.constexpr):
    return gl.load(gain + _columns(turn, 2, 1, WARPS, RUN, gl.DotOperandLayout(1, SUMS, 8)))


@gluon.jit
def _over_warps(values, places, LAYOUT: gl.constexpr):
    """Of which each warp has a part: all warps' numbers of a place to one thread, summed."""
    places.store(values)
    return gl.sum(places.load(LAYOUT), 0)


@gluon.jit
def _finish(
    sums, factor, shared, bias, residual, out, tile, num_rows, NUM_FEATURES: gl.constexpr, FEATURES: gl.constexpr,
    ROWS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The outputs of a tile: all warps' sums, the norm's scale, bias, gate, residual."""
    FLAT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, OUT))
    feature = tile * FEATURES + gl.arange(0, FEATURES, gl.SliceLayout(1, FLAT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, FLAT))
    real = (feature < NUM_FEATURES)[:, None] & (row < num_rows)[None, :]
    place = row[None, :] * NUM_FEATURES + feature[:, None]
    added = gl.zeros((FEATURES, ROWS), gl.float32, FLAT)
    if RESIDUAL:  # Asked for before the barrier of the sums.
        added = gl.load(residual + place, mask=real, other=0.0).to(gl.float32)
    whole = _over_warps(sums.reshape([sums.shape[0], sums.shape[1] // FEATURES, FEATURES, ROWS]), shared, OUT)
    if GATED:
        gate, up = gl.split(whole.permute([1, 2, 0]))
        gate = gl.convert_layout(gate, FLAT)
        up = gl.convert_layout(up, FLAT)
        if NORM:
            gate = gate * factor[None, :]
            up = up * factor[None, :]
        if BIAS:
            gate += gl.load(bias + feature, mask=feature < NUM_FEATURES, other=0.0).to(gl.float32)[:, None]
            up += gl.load(bias + NUM_FEATURES + feature, mask=feature < NUM_FEATURES, other=0.0).to(gl.float32)[:, None]
        result = activate(gate, KIND) * up
    else:
        result = gl.convert_layout(gl.sum(whole, 0), FLAT)
        if NORM:
            result = result * factor[None, :]
        if BIAS:
            result += gl.load(bias + feature, mask=feature < NUM_FEATURES, other=0.0).to(gl.float32)[:, None]
    gl.store(out + place, (result + added).to(out.dtype.element_ty), mask=real)


@gluon.jit(do_not_specialize=["tiles", "num_rows"])
def stream_kernel(
    weight, x, gain, bias, residual, out, eps, stride, num_rows, tiles,
    NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr, FEATURES: gl.constexpr, ROWS: gl.constexpr, RUN: gl.constexpr,
    WARPS: gl.constexpr, STEPS: gl.constexpr, AHEAD: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, PDL: gl.constexpr, SUMS: gl.constexpr,
    OUT: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """FEATURES outputs (pairs, with a gate) at a time, STEPS times. AHEAD: turns loaded before the first multiplies."""
    HALVES: gl.constexpr = 2 if GATED else 1
    TURNS: gl.constexpr = WIDTH // (WARPS * RUN)
    UNITS: gl.constexpr = STEPS * TURNS
    SECOND: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    FLAT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, OUT))
    shared = gl.allocate_shared_memory(gl.float32, [min(STEPS, 2), WARPS, HALVES, FEATURES, ROWS], PLACES[0])
    found = gl.allocate_shared_memory(gl.float32, [1, WARPS, ROWS], PLACES[1])
    weights = ()
    gains = ()
    rows = ()
    for unit in gl.static_range(min(AHEAD, UNITS)):
        weights = weights + (  # type: ignore[assignment]  # noqa: RUF005
            _load_weights(weight, tiles, unit, TURNS, NUM_FEATURES, WIDTH, FEATURES, HALVES, WARPS, RUN, SUMS),
        )  # fmt: skip
        if NORM:
            gains = gains + (_load_gain(gain, unit % TURNS, WARPS, RUN, SUMS),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for unit in gl.static_range(min(AHEAD, UNITS)):
        rows = rows + (_load_rows(x, stride, num_rows, unit % TURNS, ROWS, WARPS, RUN, SUMS),)  # type: ignore[assignment]  # noqa: RUF005
    squares = gl.zeros((WARPS, RUN, ROWS), gl.float32, SECOND)
    factor = gl.full((ROWS,), 1.0, gl.float32, gl.SliceLayout(0, FLAT))
    for step in gl.static_range(STEPS):
        sums = gl.zeros((WARPS, FEATURES * HALVES, ROWS), gl.float32, SUMS)
        for turn in gl.static_range(TURNS):
            if step * TURNS + turn + AHEAD < UNITS:
                weights = weights + (  # type: ignore[assignment]  # noqa: RUF005
                    _load_weights(weight, tiles, step * TURNS + turn + AHEAD, TURNS, NUM_FEATURES, WIDTH, FEATURES,
                                  HALVES, WARPS, RUN, SUMS),
                )  # fmt: skip
                rows = rows + (_load_rows(x, stride, num_rows, (turn + AHEAD) % TURNS, ROWS, WARPS, RUN, SUMS),)  # type: ignore[assignment]  # noqa: RUF005
                if NORM:
                    gains = gains + (_load_gain(gain, (turn + AHEAD) % TURNS, WARPS, RUN, SUMS),)  # type: ignore[assignment]  # noqa: RUF005
            value = rows[step * TURNS + turn]  # type: ignore[var-annotated]
            if NORM:
                wide = value.to(gl.float32)  # type: ignore[var-annotated]
                if step == 0:
                    squares += wide * wide
                value = (wide * gains[step * TURNS + turn].to(gl.float32)[:, :, None]).to(x.dtype.element_ty)
            sums = mma_v2(weights[step * TURNS + turn], value, sums)
        if NORM and step == 0:
            total = _over_warps(gl.sum(squares, 1), found.index(0), gl.SliceLayout(1, gl.SliceLayout(1, OUT)))
            factor = gl.rsqrt(gl.convert_layout(total, gl.SliceLayout(0, FLAT)) / WIDTH + eps)
        tile = gl.program_id(0) + step * gl.num_programs(0)
        _finish(sums, factor, shared.index(step % 2), bias, residual, out, tile, num_rows, NUM_FEATURES, FEATURES, ROWS,
                BIAS, RESIDUAL, NORM, GATED, KIND, OUT)  # fmt: skip
