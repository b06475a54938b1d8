"""The kernel of `codes_row`, in Gluon: one row times a weight of 4-bit codes or of fp8, without a ring.

A program owns some output features; its warps share the columns, a run of them at a time. The weight goes straight from
memory to registers, before the kernel before has ended, and becomes the tensor cores' first operand there.

Codes are bytes after three instructions for eight of them; their second operand is the row in three digits of 8 bits
(22 bits from its largest number's down), a digit to a column: so products and sums of a run are exact. fp8 becomes
fp16, exactly, by one instruction for two numbers, and so does the row, scaled by a power of two. Digits and powers of
two are counted from the largest number of a warp's columns, so that no warp waits for another's.
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
_LARGER = gl.constexpr("{ .reg .b32 a; and.b32 a, $2, 0x7FFF7FFF; max.u16x2 $0, $1, a; }")
_INTEGERS = gl.constexpr(0x4B400000)
"""The bits of 1.5 * 2 ** 23: integers of up to 22 bits added to them are added to the float too."""
_FLOAT = gl.constexpr(12582912.0)
_ASK = gl.constexpr(
    "{ .reg .pred p, q; .reg .b32 t, l; mov.u32 t, %tid.x; and.b32 l, t, 31; shr.b32 t, t, 5; setp.eq.u32 q, l, 0; "
    "setp.lt.and.u32 p, t, $3, q; "
    "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


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
def _larger(most, bits):
    """The larger of `most` and of the bits of a float of 16 bits less its sign, of two neighbours at once."""
    return gl.inline_asm_elementwise(_LARGER, "=r,r,r", [most, bits], dtype=gl.int16, is_pure=True, pack=2)


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
def _operand_of_bytes(weights, SUMS: gl.constexpr):
    """The same of fp8: the 16 columns that a thread has read are four of each of four instructions."""
    WARPS: gl.constexpr = weights.shape[0]
    FEATURES: gl.constexpr = weights.shape[1]
    WIDE: gl.constexpr = weights.shape[2]
    floats = weights.to(gl.float8e4nv, bitcast=True).to(gl.float16)
    floats = floats.reshape([WARPS, FEATURES, WIDE // 64, 4, 4, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
    return gl.convert_layout(
        floats.reshape([WARPS, FEATURES, WIDE]), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True
    )


@gluon.jit
def _floats_of(place, DIGITS: gl.constexpr, SUMS: gl.constexpr):
    """[warps, columns, 8]: the row of a turn in fp16, in that order; all of its eight columns are the same."""
    held = place.load(gl.SliceLayout(2, DIGITS))
    WARPS: gl.constexpr = held.shape[0]
    WIDE: gl.constexpr = held.shape[1]
    whole, _ = gl.broadcast(held[:, :, None], gl.full((WARPS, WIDE, 8), 0.0, gl.float16, DIGITS))
    whole = whole.reshape([WARPS, WIDE // 64, 4, 4, 2, 2, 8]).permute([0, 1, 3, 4, 2, 5, 6])
    return gl.convert_layout(whole.reshape([WARPS, WIDE, 8]), gl.DotOperandLayout(1, SUMS, 2), assert_trivial=True)


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
    # Four rows of words have 16 features: 128 bytes of each are 64 columns. What all threads have in common is added
    # by itself: it is then a part of the instruction, and one register has the rest.
    places = weight + (tile * (TILES * 4 * (WIDTH // 2)) + word // 32 * (WIDTH // 2) + warp * (SLABS * 32) + word % 32)
    return places + ((part // TILES * (NUM_FEATURES // 16) + part % TILES) * (4 * (WIDTH // 2)) + slab * 32)


@gluon.jit
def _load_codes(
    weight, scales, tile, runs, turn: gl.constexpr, LEAST: gl.constexpr, NUM_FEATURES: gl.constexpr,
    WIDTH: gl.constexpr, GROUP: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr,
    WARPS: gl.constexpr, WORDS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Words, and scales [warps, features], of one turn of a tile."""
    places = _word_places(weight, tile, NUM_FEATURES, WIDTH, SLABS, TILES, HALVES, WARPS, WORDS)
    places += turn * (WARPS * SLABS * 32)
    run = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
    row = gl.arange(0, TILES * HALVES * 16, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
    feature = tile * (TILES * 16) + row % (TILES * 16)
    if (WARPS * SLABS * 64) % GROUP == 0:
        pair = scales + (run * (SLABS * 64) // GROUP * (NUM_FEATURES * HALVES) + tile * (TILES * 16) + row % 8)
        pair += turn * (WARPS * SLABS * 64 // GROUP * NUM_FEATURES * HALVES)
    else:
        pair = scales + ((turn * WARPS + run) * (SLABS * 64) // GROUP * (NUM_FEATURES * HALVES) + tile * (TILES * 16)
                         + row % 8)  # fmt: skip
    pair += row // (TILES * 16) * NUM_FEATURES + row % (TILES * 16) // 8 * 8
    if (turn + 1) * WARPS > LEAST:  # Some warps may have no run. Words of none are multiplied by zeros.
        left = runs - turn * WARPS
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))[:, None, None, None]
        words = gl.load(places, mask=warp < left, eviction_policy="evict_first")
        real = (run < left) & (feature < NUM_FEATURES)
        return words, gl.load(pair, mask=real, other=0, eviction_policy="evict_first")
    else:
        words = gl.load(places, eviction_policy="evict_first")
        if NUM_FEATURES % (TILES * 16):  # What a missing feature is scaled by does not matter: it is not stored.
            return words, gl.load(pair, mask=feature < NUM_FEATURES, eviction_policy="evict_first")
        else:
            return words, gl.load(pair, eviction_policy="evict_first")


@gluon.jit
def _load_bytes(
    weight, scales, tile, runs, turn: gl.constexpr, LEAST: gl.constexpr, NUM_FEATURES: gl.constexpr,
    WIDTH: gl.constexpr, GROUP: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr,
    WARPS: gl.constexpr, WORDS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The same of fp8: [warps, features, columns]. Scales: of blocks of columns only."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
    row = gl.arange(0, TILES * HALVES * 16, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    column = gl.arange(0, SLABS * 64, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    place = (row // (TILES * 16) * NUM_FEATURES + row % (TILES * 16)) * WIDTH + warp * (SLABS * 64) + column
    places = weight + (tile * (TILES * 16 * WIDTH) + turn * (WARPS * SLABS * 64) + place)
    left = runs - turn * WARPS
    if (turn + 1) * WARPS > LEAST:
        found = gl.load(places, mask=warp < left, other=0, eviction_policy="evict_first")
    else:
        found = gl.load(places, eviction_policy="evict_first")
    if GROUP:
        run = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
        line = gl.arange(0, TILES * HALVES * 16, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :]
        feature = line // (TILES * 16) * NUM_FEATURES + tile * (TILES * 16) + line % (TILES * 16)
        block = scales + (feature * (WIDTH // GROUP) + (turn * WARPS + run) * (SLABS * 64) // GROUP)
        if (turn + 1) * WARPS > LEAST:
            return found, gl.load(block, mask=run < left, other=0.0)
        else:
            return found, gl.load(block)
    else:
        return found, tile


@gluon.jit
def _load_turn(
    weight, scales, tile, tiles, runs, unit: gl.constexpr, TURNS: gl.constexpr, LEAST: gl.constexpr,
    NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr,
    HALVES: gl.constexpr, WARPS: gl.constexpr, BYTES: gl.constexpr, WORDS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """One turn of one of a program's tiles, of which `tile` is the first."""
    if unit >= TURNS:  # A step that the program does not have reads the last tile and stores nothing.
        tile = gl.minimum(tile + unit // TURNS * gl.num_programs(0), tiles - 1)
    if BYTES:
        return _load_bytes(weight, scales, tile, runs, unit % TURNS, LEAST, NUM_FEATURES, WIDTH, GROUP, SLABS, TILES,
                           HALVES, WARPS, WORDS, SUMS)  # fmt: skip
    else:
        return _load_codes(weight, scales, tile, runs, unit % TURNS, LEAST, NUM_FEATURES, WIDTH, GROUP, SLABS, TILES,
                           HALVES, WARPS, WORDS, SUMS)  # fmt: skip


@gluon.jit
def _ask(places, size, lines):
    """For `size` bytes from each place on, in the L2 cache. One thread of a warp asks, since the copy engine is told
    of one place at a time."""
    gl.inline_asm_elementwise(_ASK, "=r,l,r,r", [places.to(gl.uint64), size, lines], dtype=gl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@gluon.jit
def _fetch(
    weight, tile, begin: gl.constexpr, end: gl.constexpr, NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr,
    SLABS: gl.constexpr, TILES: gl.constexpr, HALVES: gl.constexpr, BYTES: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """These runs of a tile come to the L2 cache, so that memory is busy while registers are full. A line is what lies
    in one piece of them: a feature's columns, or a quarter of 16 features' codes."""
    if begin < end:
        LINES: gl.constexpr = 16 if BYTES else 4
        LENGTH: gl.constexpr = WIDTH if BYTES else WIDTH // 2
        RUN: gl.constexpr = SLABS * (64 if BYTES else 32)
        SIZE: gl.constexpr = (end - begin) * RUN * (1 if BYTES else 4)
        line = gl.arange(0, TILES * HALVES * LINES, EACH)
        line = line // (TILES * LINES) * (NUM_FEATURES // 16 * LINES) + line % (TILES * LINES)
        places = weight + ((tile * (TILES * LINES) + line) * LENGTH + begin * RUN)
        size = gl.full((TILES * HALVES * LINES,), SIZE, gl.int32, EACH)
        _ask(places, size, gl.full((TILES * HALVES * LINES,), TILES * HALVES * LINES, gl.int32, EACH))


@gluon.jit
def _load_row(
    x, width, turn: gl.constexpr, AGAIN: gl.constexpr, ROW: gl.constexpr, COLUMNS: gl.constexpr, LEAST: gl.constexpr
):
    """Of a row of `width` columns, LEAST or more. AGAIN: said otherwise than the first time, or the compiler would take
    both loads for one."""
    place = gl.arange(0, COLUMNS, ROW) + turn * COLUMNS
    if (turn + 1) * COLUMNS > LEAST:
        return gl.load(x + place, mask=place < width, other=0.0, cache_modifier=".ca" if AGAIN else "")
    else:
        return gl.load(x + place, cache_modifier=".ca" if AGAIN else "")


@gluon.jit
def _load_rows(x, width, TURNS: gl.constexpr, ROW: gl.constexpr, COLUMNS: gl.constexpr, LEAST: gl.constexpr):
    rows = ()
    for turn in gl.static_range(TURNS):
        rows = rows + (_load_row(x, width, turn, False, ROW, COLUMNS, LEAST),)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _store_digits(values, place, WARPS: gl.constexpr, SLABS: gl.constexpr, ORDERED: gl.constexpr):
    """Columns of the row as integers of 22 bits and a sign, of which the digits lie as the codes of a thread do."""
    whole = (values + _FLOAT).to(gl.int32, bitcast=True)
    # Digits are bytes less 128: what that takes from their sum is added before.
    whole = whole + (0x808080 - _INTEGERS)
    whole = whole.reshape([WARPS * SLABS, 4, 2, 4, 2]).permute([0, 3, 1, 4, 2]).reshape([WARPS * SLABS * 64])
    low, middle, high = _planes(gl.convert_layout(whole, ORDERED, assert_trivial=True))
    digits = gl.join(gl.join(low, middle), gl.join(high, high)).reshape([WARPS, SLABS, 64, 2, 2])
    place.store(digits.permute([0, 1, 4, 3, 2]).reshape([WARPS, SLABS, 4, 64]))


@gluon.jit
def _prepare(
    x, gain, gains, width, places, found, TURNS: gl.constexpr, LEAST: gl.constexpr, WARPS: gl.constexpr,
    SLABS: gl.constexpr, BYTES: gl.constexpr, NORM: gl.constexpr, ROW: gl.constexpr, ORDERED: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """The row of `width` columns, LEAST or more, to shared memory, with a norm each warp's sum of squares too; what a
    one of it stands for, of each warp."""
    RUN: gl.constexpr = SLABS * 64
    COLUMNS: gl.constexpr = WARPS * RUN
    HELD: gl.constexpr = (5 if NORM else 10) >= TURNS  # without a norm in 16 bits
    TOP: gl.constexpr = 14 if BYTES else 21
    LAST: gl.constexpr = 14 if BYTES else 21 + 4
    rows = _load_rows(x, width, TURNS, ROW, COLUMNS, LEAST)
    values = ()
    squares = gl.full((COLUMNS,), 0.0, gl.float32, ROW)
    # Compared as integers: the largest of them is NaN if there is one.
    if NORM:
        most = gl.full((COLUMNS,), 0, gl.int32, ROW)
        for turn in gl.static_range(TURNS):
            value = rows[turn].to(gl.float32)  # type: ignore[var-annotated]
            squares += value * value
            value = value * gains[turn].to(gl.float32)
            most = gl.maximum(most, value.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
            if HELD:
                values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
        largest = gl.max(most.reshape([WARPS, RUN]), 1)
    else:
        most = gl.full((COLUMNS,), 0, gl.int16, ROW)
        for turn in gl.static_range(TURNS):
            most = _larger(most, rows[turn].to(gl.int16, bitcast=True))
        largest = gl.max(most.to(gl.int32).reshape([WARPS, RUN]), 1)
        largest = largest.to(gl.int16).to(x.dtype.element_ty, bitcast=True).to(gl.float32).to(gl.int32, bitcast=True)
    # The power of two below the largest number becomes 2 ** TOP, so most of a row's numbers stay as they are.
    power = gl.maximum(largest & 0x7F800000, 26 << 23)
    inverse = ((127 + TOP << 23) - power + (127 << 23)).to(gl.float32, bitcast=True)
    last = gl.where(largest < 0x7F800000, power - (LAST << 23), 0x7FC00000).to(gl.float32, bitcast=True)
    for turn in gl.static_range(TURNS):
        if NORM and HELD:
            value = values[turn]
        elif HELD:
            value = rows[turn].to(gl.float32)
        else:  # Of a long row registers for all of it would be those of weights: it is read again, from the cache.
            value = _load_row(x, width, turn, True, ROW, COLUMNS, LEAST).to(gl.float32)
            if NORM:
                value = value * _load_row(gain, width, turn, True, ROW, COLUMNS, LEAST).to(gl.float32)
        value = value.reshape([WARPS, RUN]) * inverse[:, None]
        if BYTES:
            places[turn].index(0).store(value.to(gl.float16))
        else:
            _store_digits(value, places[turn].index(0), WARPS, SLABS, ORDERED)
    if NORM:
        found.store(gl.sum(squares.reshape([WARPS, RUN]), 1))
    return gl.convert_layout(last, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)), assert_trivial=True)


@gluon.jit
def _add_codes(sums, words, scales, digits, OFFSETS: gl.constexpr, KIND: gl.constexpr, SUMS: gl.constexpr):
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
def _add_bytes(sums, weights, scales, row, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """The same of fp8; without blocks of columns scales are those of features, which count at the end."""
    if GROUP:
        run = mma_v2(_operand_of_bytes(weights, SUMS), row, gl.full(sums.shape, 0.0, gl.float32, SUMS))
        return sums + run * scales[:, :, None]
    else:
        return mma_v2(_operand_of_bytes(weights, SUMS), row, sums)


@gluon.jit
def _sum_of(sums, last, shared, factor, FEATURES: gl.constexpr, BYTES: gl.constexpr, SUMS: gl.constexpr,
            OUT: gl.constexpr):  # fmt: skip
    """[halves, features]: of all warps, and of all digits."""
    digit = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))
    if BYTES:
        weight = gl.where(digit == 0, 1.0, 0.0)
    else:
        weight = gl.where(digit == 0, 1.0, gl.where(digit == 1, 256.0, gl.where(digit == 2, 65536.0, 0.0)))
    mine = gl.sum(sums * weight[None, None, :], 2) * last[:, None]
    shared.store(mine.reshape([sums.shape[0], sums.shape[1] // FEATURES, FEATURES]))
    return gl.sum(shared.load(OUT), 0) * factor


@gluon.jit
def _finish(
    whole, added, channels, bias, out, feature, real, NUM_FEATURES: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """The outputs of a tile: scales of features, bias, gate, residual."""
    if GATED:
        gate, up = gl.split(whole.permute([1, 0]))
        gate = gl.convert_layout(gate, gl.SliceLayout(0, gl.SliceLayout(1, OUT)), assert_trivial=True) * channels[0]
        up = gl.convert_layout(up, gl.SliceLayout(0, gl.SliceLayout(1, OUT)), assert_trivial=True) * channels[1]
        if BIAS:
            gate += gl.load(bias + feature, mask=real, other=0.0).to(gl.float32)
            up += gl.load(bias + NUM_FEATURES + feature, mask=real, other=0.0).to(gl.float32)
        result = activate(gate, KIND) * up
    else:
        result = gl.convert_layout(gl.sum(whole, 0), gl.SliceLayout(0, gl.SliceLayout(1, OUT)), assert_trivial=True)
        result = result * channels[0]
        if BIAS:
            result += gl.load(bias + feature, mask=real, other=0.0).to(gl.float32)
        if RESIDUAL:
            result += added.to(gl.float32)
    gl.store(out + feature, result.to(out.dtype.element_ty), mask=real)


@gluon.jit
def _allocate(
    TURNS: gl.constexpr, WARPS: gl.constexpr, SLABS: gl.constexpr, BYTES: gl.constexpr, PLACES: gl.constexpr
):
    """Of every turn a place for the row: places of one allocation would be filled with a barrier between any two."""
    PLACE: gl.constexpr = PLACES[0]
    places = ()
    for _ in gl.static_range(TURNS):
        if BYTES:
            place = gl.allocate_shared_memory(gl.float16, [1, WARPS, SLABS * 64], PLACE)
        else:
            place = gl.allocate_shared_memory(gl.int8, [1, WARPS, SLABS, 4, 64], PLACE)
        places = places + (place,)  # type: ignore[assignment]  # noqa: RUF005
    return places


@gluon.jit
def _of_all_parts(whole, partial, arrived, tile, part, PARTS: gl.constexpr, OUT: gl.constexpr):
    """(the sums [halves, features] of a tile, whether this program has them): the last program of a tile to come adds
    the parts, always in the same order."""
    HALVES: gl.constexpr = whole.shape[0]
    FEATURES: gl.constexpr = whole.shape[1]
    half = gl.arange(0, HALVES, gl.SliceLayout(1, gl.SliceLayout(0, OUT)))[:, None]
    line = gl.arange(0, FEATURES, gl.SliceLayout(0, gl.SliceLayout(0, OUT)))[None, :]
    places = partial + (tile * (PARTS * HALVES * FEATURES) + half * FEATURES + line)
    gl.store(places + part * (HALVES * FEATURES), whole)
    # Every thread's stores come before the one thread's atomic that publishes them.
    gl.thread_barrier()
    complete = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
    if complete:
        gl.store(arrived + tile, 0)  # for the next launch, which waits for the end of this one
        whole = gl.load(places, cache_modifier=".cg")
        for other in gl.static_range(1, PARTS):
            whole += gl.load(places + other * (HALVES * FEATURES), cache_modifier=".cg")
    return whole, complete


@gluon.jit
def _own(
    weight, scales, x, part, PARTS: gl.constexpr, ALL: gl.constexpr, NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr,
    GROUP: gl.constexpr, SLABS: gl.constexpr, WARPS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Where a part of the columns begins in the weight, the scales and the row, and how many runs it has. Of ALL turns
    the first parts have one more than others if they cannot have equally many. NUM_FEATURES: with a gate, of both
    halves."""
    RUNS: gl.constexpr = WIDTH // (SLABS * 64)
    begin = part * (ALL // PARTS) + gl.minimum(part, ALL % PARTS)
    end = begin + ALL // PARTS + (part < ALL % PARTS).to(gl.int32)
    if BYTES:
        weight += begin * (WARPS * SLABS * 64)
        if GROUP:
            scales += begin * (WARPS * SLABS * 64 // GROUP)
    else:
        weight += begin * (WARPS * SLABS * 32)
        scales += begin * (WARPS * SLABS * 64 // GROUP * NUM_FEATURES)
    return weight, scales, x + begin * (WARPS * SLABS * 64), gl.minimum(RUNS, end * WARPS) - begin * WARPS


@gluon.jit(do_not_specialize=["tiles"])
def codes_row_kernel(
    weight, scales, x, gain, bias, residual, out, partial, arrived, eps, tiles,
    NUM_FEATURES: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr,
    WARPS: gl.constexpr, STEPS: gl.constexpr, AHEAD: gl.constexpr, FETCHED: gl.constexpr, PARTS: gl.constexpr,
    BYTES: gl.constexpr, OFFSETS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, NORM: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, PDL: gl.constexpr, WORDS: gl.constexpr, SUMS: gl.constexpr,
    DIGITS: gl.constexpr, ROW: gl.constexpr, ORDERED: gl.constexpr, FOUND: gl.constexpr, OUT: gl.constexpr,
    EACH: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """TILES * 16 outputs at a time, STEPS times; AHEAD: turns that are loaded before the first is multiplied; FETCHED:
    turns after those that come to the L2 cache before. GROUP of fp8: columns of a scale, or 0. PARTS: programs that
    share the columns of a tile, where there is one step and no norm."""
    HALVES: gl.constexpr = 2 if GATED else 1
    RUN: gl.constexpr = SLABS * 64
    ALL: gl.constexpr = (WIDTH // RUN + WARPS - 1) // WARPS
    TURNS: gl.constexpr = (ALL + PARTS - 1) // PARTS
    LEAST: gl.constexpr = WIDTH // RUN - (ALL - ALL // PARTS) * WARPS  # runs of the last part
    places = _allocate(TURNS, WARPS, SLABS, BYTES, PLACES)
    found = gl.allocate_shared_memory(gl.float32, [1, WARPS], PLACES[1])
    shared = gl.allocate_shared_memory(gl.float32, [2, WARPS, HALVES, TILES * 16], PLACES[2])
    first, part, runs = gl.program_id(0), 0, LEAST
    if PARTS > 1:
        first, part = gl.program_id(0) % tiles, gl.program_id(0) // tiles
        weight, scales, x, runs = _own(weight, scales, x, part, PARTS, ALL, NUM_FEATURES * HALVES, WIDTH, GROUP, SLABS,
                                       WARPS, BYTES)  # fmt: skip
    held = ()
    for unit in gl.static_range(min(AHEAD, STEPS * TURNS)):
        held = held + (  # type: ignore[assignment]  # noqa: RUF005
            _load_turn(weight, scales, first, tiles, runs, unit, TURNS, LEAST, NUM_FEATURES, WIDTH, GROUP, SLABS, TILES,
                       HALVES, WARPS, BYTES, WORDS, SUMS),
        )  # fmt: skip
    for step in gl.static_range(STEPS):
        tile = gl.minimum(first + step * gl.num_programs(0), tiles - 1)
        _fetch(weight, tile, max(AHEAD - step * TURNS, 0) * WARPS, min((AHEAD + FETCHED - step * TURNS) * WARPS, LEAST),
               NUM_FEATURES, WIDTH, SLABS, TILES, HALVES, BYTES, EACH)  # fmt: skip
    gains = _load_rows(gain, WIDTH, TURNS if NORM else 0, ROW, WARPS * RUN, WIDTH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    last = _prepare(x, gain, gains, runs * RUN, places, found.index(0), TURNS, LEAST * RUN, WARPS, SLABS, BYTES, NORM,
                    ROW, ORDERED, SUMS)  # fmt: skip
    factor = gl.rsqrt(gl.sum(found.index(0).load(FOUND), 0) / WIDTH + eps) if NORM else 1.0
    for step in gl.static_range(STEPS):
        tile = first + step * gl.num_programs(0)
        feature = tile * (TILES * 16) + gl.arange(0, TILES * 16, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
        real = feature < NUM_FEATURES
        added = gl.load(residual + feature, mask=real, other=0.0) if RESIDUAL else feature
        channels = (1.0, 1.0)
        if BYTES and GROUP == 0:
            channels = (gl.load(scales + feature, mask=real, other=0.0),
                        gl.load(scales + (HALVES - 1) * NUM_FEATURES + feature, mask=real, other=0.0))  # fmt: skip
        sums = gl.zeros((WARPS, TILES * HALVES * 16, 8), gl.float32, SUMS)
        for turn in gl.static_range(TURNS):
            if step * TURNS + turn + AHEAD < STEPS * TURNS:
                held = held + (  # type: ignore[assignment]  # noqa: RUF005
                    _load_turn(weight, scales, first, tiles, runs, step * TURNS + turn + AHEAD, TURNS, LEAST,
                               NUM_FEATURES, WIDTH, GROUP, SLABS, TILES, HALVES, WARPS, BYTES, WORDS, SUMS),
                )  # fmt: skip
            words, pairs = held[step * TURNS + turn]  # type: ignore[var-annotated]
            if BYTES:
                sums = _add_bytes(sums, words, pairs, _floats_of(places[turn].index(0), DIGITS, SUMS), GROUP, SUMS)
            else:
                sums = _add_codes(sums, words, pairs, _digits_of(places[turn].index(0), DIGITS, SUMS), OFFSETS,
                                  out.dtype.element_ty, SUMS)  # fmt: skip
        whole = _sum_of(sums, last, shared.index(step % 2), factor, TILES * 16, BYTES, SUMS, OUT)
        complete = True
        if PARTS > 1:
            whole, complete = _of_all_parts(whole, partial, arrived, tile, part, PARTS, OUT)
        if complete:
            _finish(whole, added, channels, bias, out, feature, real, NUM_FEATURES, BIAS, RESIDUAL, GATED, KIND, OUT)
