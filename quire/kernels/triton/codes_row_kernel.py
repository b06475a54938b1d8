"""The kernel of `codes_row`, in Gluon: one row times a weight of 4-bit codes, in integers, without a ring.

A program owns some output features; its warps share the columns, a run of them at a time. Codes go straight from memory
to registers, before the kernel before has ended, and are multiplied there as bytes by the tensor cores: a word of eight
codes is two registers of their first operand after three instructions. Their second operand is the row in three digits
of 8 bits (22 bits from its largest number's down), a digit to a column: so products and sums of a run are exact.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.activation import activate

_STEP = "shl.b32 a, $%d, 4; lop3.b32 $%d, a, x, m, 0x28; lop3.b32 $%d, $%d, x, m, 0x28;"
_BYTES = gl.constexpr(
    "{ .reg .b32 a, x, m; mov.b32 x, 0x88888888; mov.b32 m, 0xF0F0F0F0; "
    + " ".join(_STEP % (8 + word, 2 * word, 2 * word + 1, 8 + word) for word in range(4))
    + " }"
)
_PLANES = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $3, $4, 0x5140; prmt.b32 b, $5, $6, 0x5140; prmt.b32 $0, a, b, 0x5410; "
    "prmt.b32 $1, a, b, 0x7632; prmt.b32 a, $3, $4, 0x62; prmt.b32 b, $5, $6, 0x62; prmt.b32 $2, a, b, 0x5410; "
    "xor.b32 $0, $0, 0x80808080; xor.b32 $1, $1, 0x80808080; xor.b32 $2, $2, 0x80808080; }"
)
_INTEGERS = gl.constexpr(0x4B400000)
"""The bits of 1.5 * 2 ** 23: integers of up to 22 bits added to them are added to the float too."""
_FLOAT = gl.constexpr(12582912.0)


@gluon.jit
def _bytes(words):
    """Of four neighbouring words the codes less 8, times 16, as bytes: eight tensors, of which the one of word j and
    half r has byte b of that word in place b of the four."""
    return gl.inline_asm_elementwise(
        _BYTES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [words], dtype=[gl.int8] * 8, is_pure=True, pack=4
    )


@gluon.jit
def _planes(numbers):
    """The three low bytes of integers, each less 128."""
    return gl.inline_asm_elementwise(
        _PLANES, "=&r,=&r,=&r,r,r,r,r", [numbers], dtype=[gl.int8] * 3, is_pure=True, pack=4
    )


@gluon.jit
def _operand(words, SUMS: gl.constexpr):
    """[warps, features, columns] of words [warps, tiles of 16 features, slabs, 128]."""
    WARPS: gl.constexpr = words.shape[0]
    TILES: gl.constexpr = words.shape[1]
    SLABS: gl.constexpr = words.shape[2]
    a, b, c, d, e, f, g, h = _bytes(words)
    low = gl.join(gl.join(a, b), gl.join(c, d))
    high = gl.join(gl.join(e, f), gl.join(g, h))
    # Feature of eight, pair of columns, byte; then half of 16 features, and the word's two bits.
    codes = gl.join(low, high).reshape([WARPS, TILES, SLABS, 8, 4, 4, 2, 2, 2])
    codes = codes.permute([0, 1, 6, 3, 2, 8, 7, 4, 5]).reshape([WARPS, TILES * 16, SLABS * 64])
    return gl.convert_layout(codes, gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)


@gluon.jit
def _digits_of(place, DIGITS: gl.constexpr, SUMS: gl.constexpr):
    """[warps, columns, 8]: the row's digits of a turn, as the tensor cores' second operand; column 4 + n is n again."""
    held = place.load(gl.SliceLayout(2, DIGITS))
    WARPS: gl.constexpr = held.shape[0]
    SLABS: gl.constexpr = held.shape[1]
    whole, _ = gl.broadcast(held[:, :, None], gl.full((WARPS, SLABS, 2, 4, 64), 0, gl.int8, DIGITS))
    whole = whole.reshape([WARPS, SLABS, 8, 4, 4, 4]).permute([0, 1, 4, 3, 5, 2]).reshape([WARPS, SLABS * 64, 8])
    return gl.convert_layout(whole, gl.DotOperandLayout(1, SUMS, 4), assert_trivial=True)


@gluon.jit
def _word_places(
    weight, tile, NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr,
    HALVES: gl.constexpr, WARPS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Of the first turn's words [warps, tiles of 16 features, slabs, 128] of a program's tile. With a gate the second
    half of the tiles is of the weight's second half."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))[:, None, None, None]
    part = gl.arange(0, TILES * HALVES, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    part = part[None, :, None, None]
    slab = gl.arange(0, SLABS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS))))[None, None, :, None]
    word = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))))[None, None, None, :]
    # Four rows of words have 16 features: 128 bytes of each are 64 columns.
    line = (part // TILES * (NUM_FEATURES // 16) + part % TILES) * 4 + word // 32
    place = line * (WIDTH // 2) + (warp * SLABS + slab) * 32 + word % 32
    return weight + (tile * (TILES * 4 * (WIDTH // 2)) + place)


@gluon.jit
def _load_codes(
    weight, scales, tiles, unit: gl.constexpr, TURNS: gl.constexpr, NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr,
    GROUP: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, WARPS: gl.constexpr,
    WORDS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Words, and scales [warps, features], of one turn of one of a program's tiles."""
    turn: gl.constexpr = unit % TURNS
    ALL: gl.constexpr = TILES * HALVES
    tile = gl.program_id(0)
    if unit >= TURNS:  # A step that the program does not have reads the last tile and stores nothing.
        tile = gl.minimum(tile + unit // TURNS * gl.num_programs(0), tiles - 1)
    places = _word_places(weight, tile, NUM_FEATURES, WIDTH, SLABS, TILES, HALVES, WARPS, WORDS)
    places += turn * (WARPS * SLABS * 32)
    run = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
    row = gl.arange(0, ALL * 16, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
    feature = tile * (TILES * 16) + row % (TILES * 16)
    column = row // (TILES * 16) * NUM_FEATURES + feature
    if (WARPS * SLABS * 64) % GROUP == 0:
        pair = scales + (run * (SLABS * 64) // GROUP * (NUM_FEATURES * HALVES) + column)
        pair += turn * (WARPS * SLABS * 64 // GROUP * NUM_FEATURES * HALVES)
    else:
        pair = scales + ((turn * WARPS + run) * (SLABS * 64) // GROUP * (NUM_FEATURES * HALVES) + column)
    # What a missing feature is scaled by does not matter: it is not stored.
    words = gl.load(places, eviction_policy="evict_first")
    if NUM_FEATURES % (TILES * 16):
        return words, gl.load(pair, mask=feature < NUM_FEATURES, eviction_policy="evict_first")
    else:
        return words, gl.load(pair, eviction_policy="evict_first")


@gluon.jit
def _load_row(x, turn: gl.constexpr, ROW: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.load(x + gl.arange(0, COLUMNS, ROW) + turn * COLUMNS)


@gluon.jit
def _store_digits(values, inverse, place, WARPS: gl.constexpr, SLABS: gl.constexpr, ORDERED: gl.constexpr):
    """Columns of the row as integers of 22 bits and a sign, of which the digits lie as the codes of a thread do."""
    whole = (values * inverse + _FLOAT).to(gl.int32, bitcast=True)
    # Digits are bytes less 128: what that takes from their sum is added before.
    whole = whole + (0x808080 - _INTEGERS)
    whole = whole.reshape([WARPS * SLABS, 4, 2, 4, 2]).permute([0, 3, 1, 4, 2]).reshape([WARPS * SLABS * 64])
    low, middle, high = _planes(gl.convert_layout(whole, ORDERED, assert_trivial=True))
    digits = gl.join(gl.join(low, middle), gl.join(high, high)).reshape([WARPS, SLABS, 64, 2, 2])
    place.store(digits.permute([0, 1, 4, 3, 2]).reshape([WARPS, SLABS, 4, 64]))


@gluon.jit
def _over_warps(values, places, ALL: gl.constexpr):
    """[warps, numbers] of which each warp has a part: to all threads, all warps' numbers of a column in one thread."""
    places.store(values)
    return places.load(ALL)


@gluon.jit
def _prepare(
    x, gain, gains, digits, shared, TURNS: gl.constexpr, WARPS: gl.constexpr, SLABS: gl.constexpr, NORM: gl.constexpr,
    ROW: gl.constexpr, ORDERED: gl.constexpr, FOUND: gl.constexpr,
):  # fmt: skip
    """The row's digits to shared memory; what one of the last digit stands for, and the sum of the row's squares."""
    COLUMNS: gl.constexpr = WARPS * SLABS * 64
    HELD: gl.constexpr = TURNS <= 4
    rows = ()
    for turn in gl.static_range(TURNS):
        rows = rows + (_load_row(x, turn, ROW, COLUMNS),)  # type: ignore[assignment]  # noqa: RUF005
    values = ()
    most = gl.full((COLUMNS,), 0, gl.int32, ROW)
    squares = gl.full((COLUMNS,), 0.0, gl.float32, ROW)
    for turn in gl.static_range(TURNS):
        value = rows[turn].to(gl.float32)  # type: ignore[var-annotated]
        if NORM:
            squares += value * value
            value = value * gains[turn].to(gl.float32)
        # As integers, since the largest of them is then NaN if there is one.
        most = gl.maximum(most, value.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
        if HELD:
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
    largest = gl.max(most.reshape([WARPS, SLABS * 64]), 1)
    square = gl.sum(squares.reshape([WARPS, SLABS * 64]), 1).to(gl.int32, bitcast=True)
    found = _over_warps(gl.join(largest, square), shared, FOUND)
    largest, square = gl.split(found)
    largest = gl.max(largest, 0)
    # The power of two below the largest number becomes 2 ** 21, so most of a row's numbers stay as they are.
    power = gl.maximum(largest & 0x7F800000, 26 << 23)
    inverse = ((148 << 23) - power + (127 << 23)).to(gl.float32, bitcast=True)
    last = gl.where(largest < 0x7F800000, power - (21 + 4 << 23), 0x7FC00000).to(gl.float32, bitcast=True)
    for turn in gl.static_range(TURNS):
        if HELD:
            value = values[turn]
        else:  # Of a long row registers for all of it would be those of codes: it is read again, from the cache.
            value = _load_row(x, turn, ROW, COLUMNS).to(gl.float32)
            if NORM:
                value = value * _load_row(gain, turn, ROW, COLUMNS).to(gl.float32)
        _store_digits(value, inverse, digits[turn].index(0), WARPS, SLABS, ORDERED)
    return last, gl.sum(square.to(gl.float32, bitcast=True), 0)


@gluon.jit
def _add_run(sums, words, scales, digits, OFFSETS: gl.constexpr, KIND: gl.constexpr, SUMS: gl.constexpr):
    """Sums plus those of a run of columns: of codes times its scale, of the row's digits times its offset."""
    zero = gl.full(sums.shape, _INTEGERS, gl.int32, SUMS)
    run = mma_v2(_operand(words, SUMS), digits, zero).to(gl.float32, bitcast=True) - _FLOAT
    scale = (scales & 0xFFFF).to(gl.int16).to(KIND, bitcast=True).to(gl.float32)
    sums += run * scale[:, :, None]
    if OFFSETS:
        ones = gl.full((sums.shape[0], sums.shape[1], digits.shape[1]), 16, gl.int8, gl.DotOperandLayout(0, SUMS, 4))
        plain = mma_v2(ones, digits, zero).to(gl.float32, bitcast=True) - _FLOAT
        offset = (scales >> 16).to(gl.int16).to(KIND, bitcast=True).to(gl.float32)
        sums += plain * offset[:, :, None]
    return sums


@gluon.jit
def _finish(
    sums, shared, added, bias, out, feature, real, last, NUM_FEATURES: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, SUMS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The outputs of a tile: all warps' sums, all digits; bias, gate, residual."""
    FEATURES: gl.constexpr = feature.shape[0]
    digit = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))
    weight = gl.where(digit == 0, 1.0, gl.where(digit == 1, 256.0, gl.where(digit == 2, 65536.0, 0.0)))
    mine = gl.sum(sums * weight[None, None, :], 2).to(gl.int32, bitcast=True)
    mine = mine.reshape([sums.shape[0], sums.shape[1] // FEATURES, FEATURES])
    whole = gl.sum(_over_warps(mine, shared, OUT).to(gl.float32, bitcast=True), 0) * last
    if GATED:
        gate, up = gl.split(whole.permute([1, 0]))
        gate = gl.convert_layout(gate, gl.SliceLayout(0, gl.SliceLayout(1, OUT)), assert_trivial=True)
        up = gl.convert_layout(up, gl.SliceLayout(0, gl.SliceLayout(1, OUT)), assert_trivial=True)
        if BIAS:
            gate += gl.load(bias + feature, mask=real, other=0.0).to(gl.float32)
            up += gl.load(bias + NUM_FEATURES + feature, mask=real, other=0.0).to(gl.float32)
        result = activate(gate, KIND) * up
    else:
        result = gl.convert_layout(gl.sum(whole, 0), gl.SliceLayout(0, gl.SliceLayout(1, OUT)), assert_trivial=True)
        if BIAS:
            result += gl.load(bias + feature, mask=real, other=0.0).to(gl.float32)
        if RESIDUAL:
            result += added.to(gl.float32)
    gl.store(out + feature, result.to(out.dtype.element_ty), mask=real)


@gluon.jit(do_not_specialize=["tiles"])
def codes_row_kernel(
    weight, scales, x, gain, bias, residual, out, eps, tiles,
    NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr,
    WARPS: gl.constexpr, STEPS: gl.constexpr, AHEAD: gl.constexpr, OFFSETS: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, PDL: gl.constexpr,
    WORDS: gl.constexpr, SUMS: gl.constexpr, DIGITS: gl.constexpr, ROW: gl.constexpr, ORDERED: gl.constexpr,
    FOUND: gl.constexpr, OUT: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """TILES * 16 outputs at a time, STEPS times; AHEAD: turns that are loaded before the first is multiplied."""
    HALVES: gl.constexpr = 2 if GATED else 1
    TURNS: gl.constexpr = WIDTH // (WARPS * SLABS * 64)
    digits = ()
    for _ in gl.static_range(TURNS):  # Places of one allocation would be filled with a barrier between any two.
        place = gl.allocate_shared_memory(gl.int8, [1, WARPS, SLABS, 4, 64], PLACES[0])
        digits = digits + (place,)  # type: ignore[assignment]  # noqa: RUF005
    found = gl.allocate_shared_memory(gl.int32, [1, WARPS, 2], PLACES[1])
    shared = gl.allocate_shared_memory(gl.int32, [2, WARPS, HALVES, TILES * 16], PLACES[2])
    held = ()
    for unit in gl.static_range(min(AHEAD, STEPS * TURNS)):
        held = held + (  # type: ignore[assignment]  # noqa: RUF005
            _load_codes(weight, scales, tiles, unit, TURNS, NUM_FEATURES, WIDTH, GROUP, SLABS, TILES, HALVES, WARPS,
                        WORDS, SUMS),
        )  # fmt: skip
    gains = ()
    if NORM:
        for turn in gl.static_range(TURNS):
            gains = gains + (_load_row(gain, turn, ROW, WARPS * SLABS * 64),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    last, squares = _prepare(x, gain, gains, digits, found.index(0), TURNS, WARPS, SLABS, NORM, ROW, ORDERED, FOUND)
    if NORM:
        last = last * gl.rsqrt(squares / WIDTH + eps)
    for step in gl.static_range(STEPS):
        tile = gl.program_id(0) + step * gl.num_programs(0)
        feature = tile * (TILES * 16) + gl.arange(0, TILES * 16, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
        real = feature < NUM_FEATURES
        added = feature
        if RESIDUAL:
            added = gl.load(residual + feature, mask=real, other=0.0)
        sums = gl.zeros((WARPS, TILES * HALVES * 16, 8), gl.float32, SUMS)
        for turn in gl.static_range(TURNS):
            if step * TURNS + turn + AHEAD < STEPS * TURNS:
                held = held + (  # type: ignore[assignment]  # noqa: RUF005
                    _load_codes(weight, scales, tiles, step * TURNS + turn + AHEAD, TURNS, NUM_FEATURES, WIDTH, GROUP,
                                SLABS, TILES, HALVES, WARPS, WORDS, SUMS),
                )  # fmt: skip
            words, pairs = held[step * TURNS + turn]  # type: ignore[var-annotated]
            row = _digits_of(digits[turn].index(0), DIGITS, SUMS)
            sums = _add_run(sums, words, pairs, row, OFFSETS, out.dtype.element_ty, SUMS)
        _finish(sums, shared.index(step % 2), added, bias, out, feature, real, last, NUM_FEATURES, BIAS, RESIDUAL,
                GATED, KIND, SUMS, OUT)  # fmt: skip
