"""The kernel of `attention_few`, in Gluon: decode attention of one or two sequences, whose time is latency.

A program has some keys of a sequence and a KV head, and all query heads of that KV head, at most eight. Its first keys
come to registers, as the tensor cores want them, and its first values to shared memory before it waits for the kernel
before, which wrote nothing but the step's q, k and v. Keys are the rows of the first operand and queries the columns
of the second: so q is normed and rotated where it is multiplied, by each warp for itself. The step's own key and value
take their places in the operands; the cache gets them for later steps. As in `attention_decode`, the program that is
done last joins a sequence's pieces in their order.

A cache in fp8 is multiplied in fp16, to which its numbers are converted exactly: values before they are stored, keys
where they are multiplied. Until then keys are words of four: single bytes that live across a branch or a loop cost two
instructions each. The scales of a head's keys and values (SCALED) are in its queries and in its result. A step's own
key and value are rounded once, as the cache holds them, so that a step attends to what later ones read.

With drafts (DRAFTS) a row reads the keys of the rows before it that are of the same sequence, which the cache does not
have yet: whoever has the sequence's last piece norms and rotates them all, as a tile of their own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.triton.decode_task import load_task

_MOST_QUERIES = gl.constexpr(8)
"""Columns that an MMA has."""
_JOINED = gl.constexpr(16)
"""Pieces that are read at once."""
_NEW = gl.constexpr(16)
"""Rows of the tile of new keys: as few as an MMA has."""
_LOOKED_AT = gl.constexpr(8)
"""Rows of a step that may have drafts: so many are looked at for those of one sequence."""
_FLOATS = gl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 x; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 x, a; mov.b32 {$0, $1}, x; "
    "cvt.rn.f16x2.e4m3x2 x, b; mov.b32 {$2, $3}, x; }"
)
_WORD = gl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; "
    "mov.b32 $0, {a, b}; }"
)


@gluon.jit
def _places(span, table, head, NUM_KV: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """Where KEYS keys of a sequence lie in the cache, and which of them to read. `span`: (the first of them, first and
    end of those to read)."""
    position = span[0] + gl.arange(0, KEYS, LAYOUT)
    seen = (position >= span[1]) & (position < span[2])
    block = gl.load(table + position // PAGE, mask=seen, other=0).to(gl.int64)
    return ((block * NUM_KV + head) * PAGE + position % PAGE) * DIM, seen


@gluon.jit
def _load(
    span, table, head, k_cache, v_cache, NUM_KV: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr,
    KEYS: gl.constexpr, KEY: gl.constexpr, VALUE: gl.constexpr,
):  # fmt: skip
    """Both halves of keys' features, each [keys, DIM / 2] as the tensor cores' first operand (or words of four of them)
    and values."""
    WIDE: gl.constexpr = DIM // 4 if k_cache.dtype.element_ty == gl.int32 else DIM
    places, seen = _places(span, table, head, NUM_KV, PAGE, WIDE, KEYS, gl.SliceLayout(1, KEY))
    half = k_cache + (places[:, None] + gl.arange(0, WIDE // 2, gl.SliceLayout(0, KEY))[None, :])
    low = gl.load(half, mask=seen[:, None], other=0)
    high = gl.load(half + WIDE // 2, mask=seen[:, None], other=0)
    rows, real = _places(span, table, head, NUM_KV, PAGE, DIM, KEYS, gl.SliceLayout(1, VALUE))
    whole = v_cache + (rows[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, VALUE))[None, :])
    return low, high, gl.load(whole, mask=real[:, None], other=0.0)


@gluon.jit
def _floats(words):
    """The four numbers of each word in fp16."""
    return gl.inline_asm_elementwise(
        _FLOATS, "=h,=h,=h,=h,r", [words], dtype=[gl.float16] * 4, is_pure=True, pack=1
    )


@gluon.jit
def _word(a, b, c, d):
    """Four numbers in float32 as a word of fp8."""
    return gl.inline_asm_elementwise(_WORD, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(words, SUMS: gl.constexpr):
    """Words [keys, n] of fp8 as the first operand [keys, 4 n] in fp16."""
    KEYS: gl.constexpr = words.shape[0]
    WIDE: gl.constexpr = words.shape[1]
    a, b, c, d = _floats(words)
    floats = gl.join(gl.join(a, b), gl.join(c, d)).permute([0, 1, 3, 2]).reshape([KEYS, 4 * WIDE])
    return gl.convert_layout(floats, gl.DotOperandLayout(0, SUMS, 8), assert_trivial=True)


@gluon.jit
def _words(numbers, shrink, SUMS: gl.constexpr):
    """Features [4 n] of a key in float32 as the cache holds them, in words."""
    numbers = numbers * shrink
    WIDE: gl.constexpr = numbers.shape[0] // 4
    even, odd = gl.split(numbers.reshape([WIDE, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.convert_layout(
        _word(a, b, c, d), gl.SliceLayout(0, gl.DotOperandLayout(0, SUMS, 2)), assert_trivial=True)


@gluon.jit
def _scales(kv_scales, head, NUM_KV: gl.constexpr, SCALED: gl.constexpr):
    """What the keys and the values of a KV head are multiplied by as they are read."""
    if SCALED:
        return gl.load(kv_scales + head), gl.load(kv_scales + NUM_KV + head)
    else:
        return 1.0, 1.0


@gluon.jit
def _in_cache(values, shrink, STORED: gl.constexpr, SCALED: gl.constexpr):
    """Keys or values as the cache holds them."""
    if SCALED:
        return (values.to(gl.float32) * shrink).to(STORED)
    else:
        return values.to(STORED)


@gluon.jit
def _halves(start, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """The first and the second half of DIM numbers."""
    place = start + gl.arange(0, DIM // 2, LAYOUT)
    return gl.load(place), gl.load(place + DIM // 2)


@gluon.jit
def _turned(low, high, square, gains, angles, eps, scale, DIM: gl.constexpr, NORM: gl.constexpr):
    """Both halves of heads, of which the squares' sum is given, normed, times `scale`, and rotated."""
    if NORM:
        factor = gl.rsqrt(square / DIM + eps) * scale
        low = low * factor * gains[0]
        high = high * factor * gains[1]
    cos, sin = angles
    return low * cos - high * sin, high * cos + low * sin


@gluon.jit
def _load_queries(qkv, head, GROUP: gl.constexpr, DIM: gl.constexpr, QUERY: gl.constexpr):
    """Both halves of the features, [DIM / 2, 8] as the second operand."""
    dim = gl.arange(0, DIM // 2, gl.SliceLayout(1, QUERY))[:, None]
    member = gl.arange(0, _MOST_QUERIES, gl.SliceLayout(0, QUERY))[None, :]
    start = qkv + ((head * GROUP + member) * DIM + dim)
    low = gl.load(start, mask=member < GROUP, other=0.0)
    return low, gl.load(start + DIM // 2, mask=member < GROUP, other=0.0)


@gluon.jit
def _queries(raw, gains, angles, eps, scale, DIM: gl.constexpr, NORM: gl.constexpr, FP8: gl.constexpr):
    """Queries as operands, times `scale`."""
    low = raw[0].to(gl.float32)
    high = raw[1].to(gl.float32)
    square = (gl.sum(low * low, 0) + gl.sum(high * high, 0))[None, :]
    gains = (gains[0].to(gl.float32)[:, None], gains[1].to(gl.float32)[:, None])
    low, high = _turned(low, high, square, gains, (angles[0][:, None], angles[1][:, None]), eps, scale, DIM, NORM)
    if FP8 and not NORM:
        low = low * scale
        high = high * scale
    kind: gl.constexpr = gl.float16 if FP8 else raw[0].dtype
    return low.to(kind), high.to(kind)


@gluon.jit
def _new_key(
    low, high, gains, angles, eps, DIM: gl.constexpr, NORM: gl.constexpr, KIND: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    low = low.to(gl.float32)
    high = high.to(gl.float32)
    cos = gl.convert_layout(angles[0], LAYOUT, assert_trivial=True)
    sin = gl.convert_layout(angles[1], LAYOUT, assert_trivial=True)
    gains = (gains[0].to(gl.float32), gains[1].to(gl.float32))
    square = gl.sum(low * low, 0) + gl.sum(high * high, 0)
    low, high = _turned(low, high, square, gains, (cos, sin), eps, 1.0, DIM, NORM)
    return low.to(KIND), high.to(KIND)


@gluon.jit
def _new_of(seq, row, length, rows, context_len, HAS_ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """How many rows of the step, this one the last of them, are of its sequence, one position after another."""
    count = row * 0 + 1
    if HAS_ROWS:
        back = gl.arange(0, _LOOKED_AT, LAYOUT)
        other = seq - back
        here = other >= 0
        same = gl.load(rows + other, mask=here, other=-1) == row
        follows = gl.load(context_len + other, mask=here, other=-1) == length - back
        count = gl.sum((same & follows).to(gl.int32), 0)
    return count


@gluon.jit
def _new_angles(rope, fresh, count, DIM: gl.constexpr, KEY: gl.constexpr):
    """Cosines and sines [16, DIM / 2] of `count` positions from `fresh` on."""
    number = gl.arange(0, _NEW, gl.SliceLayout(1, KEY))[:, None]
    place = rope + (fresh + number) * DIM + gl.arange(0, DIM // 2, gl.SliceLayout(0, KEY))[None, :]
    return gl.load(place, mask=number < count, other=1.0), gl.load(place + DIM // 2, mask=number < count, other=0.0)


@gluon.jit
def _load_new(source, count, q_stride, NUM_KV: gl.constexpr, DIM: gl.constexpr, SUMS: gl.constexpr):
    """Both halves of the keys of `count` rows of the step, and their values, each as the first operand."""
    KEY: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    TURNED: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    number = gl.arange(0, _NEW, gl.SliceLayout(1, KEY))[:, None]
    place = source + number.to(gl.int64) * q_stride + gl.arange(0, DIM // 2, gl.SliceLayout(0, KEY))[None, :]
    low = gl.load(place, mask=number < count, other=0.0)
    high = gl.load(place + DIM // 2, mask=number < count, other=0.0)
    row = gl.arange(0, _NEW, gl.SliceLayout(0, TURNED))[None, :]
    whole = source + NUM_KV * DIM + row.to(gl.int64) * q_stride + gl.arange(0, DIM, gl.SliceLayout(1, TURNED))[:, None]
    return low, high, gl.load(whole, mask=row < count, other=0.0)


@gluon.jit
def _new_keys(low, high, gains, angles, eps, DIM: gl.constexpr, NORM: gl.constexpr, KIND: gl.constexpr):
    low = low.to(gl.float32)
    high = high.to(gl.float32)
    square = (gl.sum(low * low, 1) + gl.sum(high * high, 1))[:, None]
    wide = angles
    if NORM:
        wide = (gains[0].to(gl.float32)[None, :], gains[1].to(gl.float32)[None, :])
    low, high = _turned(low, high, square, wide, angles, eps, 1.0, DIM, NORM)
    return low.to(KIND), high.to(KIND)


@gluon.jit
def _store_newest(k_place, v_place, low, high, value, count, DIM: gl.constexpr, SUMS: gl.constexpr):
    """The last of the new keys and values, which is this row's, to the cache."""
    KEY: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    TURNED: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row = gl.arange(0, _NEW, gl.SliceLayout(1, KEY))[:, None]
    feature = gl.arange(0, DIM // 2, gl.SliceLayout(0, KEY))[None, :] + row * 0
    gl.store(k_place + feature, low, mask=row == count - 1)
    gl.store(k_place + DIM // 2 + feature, high, mask=row == count - 1)
    number = gl.arange(0, _NEW, gl.SliceLayout(0, TURNED))[None, :]
    dim = gl.arange(0, DIM, gl.SliceLayout(1, TURNED))[:, None] + number * 0
    gl.store(v_place + dim, value, mask=number == count - 1)


@gluon.jit
def _new_sums(low, high, value, queries, fresh, first, count, scale, DIM: gl.constexpr, SUMS: gl.constexpr):
    """Maximum, sum of weights and weighted values of the tile of new keys."""
    number = gl.arange(0, _NEW, gl.SliceLayout(1, SUMS))
    scores = mma_v2(low, queries[0], gl.zeros((_NEW, _MOST_QUERIES), gl.float32, SUMS))
    scores = mma_v2(high, queries[1], scores) * scale
    seen = (number < count) & (fresh + number >= first)
    scores = gl.where(seen[:, None], scores, float("-inf"))
    peak = gl.max(scores, 0)
    weight = gl.exp2(scores - peak[None, :])
    share = gl.convert_layout(weight.to(low.dtype), gl.DotOperandLayout(1, SUMS, 2))
    return peak, gl.sum(weight, 0), mma_v2(value, share, gl.zeros((DIM, _MOST_QUERIES), gl.float32, SUMS))


@gluon.jit
def _join(
    partial, summary, target, first, pieces, num_parts, NUM_KV: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    JOIN: gl.constexpr,
):  # fmt: skip
    """The weighted mean of all pieces: a thread has some features of one query head, of each of 16 pieces at once."""
    OF_PIECE: gl.constexpr = gl.SliceLayout(2, JOIN)
    FOUND: gl.constexpr = gl.SliceLayout(0, JOIN)
    lane = gl.arange(0, _JOINED, gl.SliceLayout(1, OF_PIECE))[:, None]
    member = gl.arange(0, _MOST_QUERIES, gl.SliceLayout(0, OF_PIECE))[None, :]
    dim = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, JOIN)))[None, None, :]
    peak = gl.full((_MOST_QUERIES,), float("-inf"), gl.float32, gl.SliceLayout(0, OF_PIECE))
    total = gl.zeros((_MOST_QUERIES,), gl.float32, gl.SliceLayout(0, OF_PIECE))
    sums = gl.zeros((_MOST_QUERIES, DIM), gl.float32, FOUND)
    for start in range(0, pieces, _JOINED):
        part = (first + (start + lane) * NUM_KV) * GROUP + member
        real = (start + lane < pieces) & (member < GROUP)
        height = gl.load(summary + part, mask=real, other=float("-inf"), cache_modifier=".cg")
        weight = gl.load(summary + num_parts * GROUP + part, mask=real, other=0.0, cache_modifier=".cg")
        place = partial + (part[:, :, None] * DIM + dim)
        values = gl.load(place, mask=real[:, :, None], other=0.0, cache_modifier=".cg")
        higher = gl.maximum(peak, gl.max(height, 0))
        # Queries that are none have no peak; 0 instead keeps their weight from being NaN.
        level = gl.where(higher == float("-inf"), 0.0, higher)
        shrink = gl.exp2(peak - level)
        share = gl.exp2(height - level[None, :])
        total = total * shrink + gl.sum(share * weight, 0)
        grown = gl.convert_layout(shrink, gl.SliceLayout(1, FOUND), assert_trivial=True)
        sums = sums * grown[:, None] + gl.sum(values * share[:, :, None], 0)
        peak = higher
    divisor = gl.convert_layout(total, gl.SliceLayout(1, FOUND), assert_trivial=True)
    row = gl.arange(0, _MOST_QUERIES, gl.SliceLayout(1, FOUND))[:, None]
    place = target + (row * DIM + gl.arange(0, DIM, gl.SliceLayout(0, FOUND))[None, :])
    gl.store(place, (sums / divisor[:, None]).to(target.dtype.element_ty), mask=row < GROUP)


@gluon.jit
def _finish(
    acc, peak, total, out, seq, head, task, scratch, NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, SUMS: gl.constexpr, JOIN: gl.constexpr,
):  # fmt: skip
    """A sequence of one piece is done; of more, this piece is stored, and the last one that is joins them."""
    number, piece, pieces = task
    partial, summary, arrived, num_parts = scratch
    dim = gl.arange(0, DIM, gl.SliceLayout(1, SUMS))[:, None]
    member = gl.arange(0, _MOST_QUERIES, gl.SliceLayout(0, SUMS))
    heads = out + seq * (NUM_HEADS * DIM) + head * GROUP * DIM
    if pieces == 1:
        found = (acc / total[None, :]).to(out.dtype.element_ty)
        gl.store(heads + (member[None, :] * DIM + dim), found, mask=member[None, :] < GROUP)
    else:
        mine = (number * NUM_KV + head) * GROUP
        gl.store(partial + ((mine + member)[None, :] * DIM + dim), acc, mask=member[None, :] < GROUP)
        gl.store(summary + mine + member, peak, mask=member < GROUP)
        gl.store(summary + num_parts * GROUP + mine + member, total, mask=member < GROUP)
        # Every thread's stores come before the one thread's atomic that publishes them.
        gl.thread_barrier()
        if gl.atomic_add(arrived + seq * NUM_KV + head, 1, sem="acq_rel") == pieces - 1:
            first = (number - piece) * NUM_KV + head
            _join(partial, summary, heads, first, pieces, num_parts, NUM_KV, GROUP, DIM, JOIN)
            gl.store(arrived + seq * NUM_KV + head, 0)


@gluon.jit
def _add_tile(
    tile, queries, new, values, sums, start, newest, first, end, length, scale, KEYS: gl.constexpr, SUMS: gl.constexpr,
    DRAFTS: gl.constexpr,
):  # fmt: skip
    """Maximum, weights and weighted values with the keys from `start` on. `new`: the step's key and value, which are of
    this tile if it is the last one; else, and with drafts, they are not looked at."""
    TURNED: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    k_low, k_high = tile
    KEY: gl.constexpr = k_low.type.layout
    peak, total, weights, acc = sums
    v = values.permute([1, 0]).load(TURNED)
    if DRAFTS:
        pass
    elif (end == length) & (start + KEYS >= end):
        mine = newest - start == gl.arange(0, KEYS, gl.SliceLayout(1, KEY))
        k_low = gl.where(mine[:, None], new[0][None, :], k_low)
        k_high = gl.where(mine[:, None], new[1][None, :], k_high)
        here = newest - start == gl.arange(0, KEYS, gl.SliceLayout(0, TURNED))
        v = gl.where(here[None, :], new[2][:, None], v)
    if k_low.dtype == gl.int32:
        k_low = _operand(k_low, SUMS)
        k_high = _operand(k_high, SUMS)
    scores = mma_v2(k_low, queries[0], gl.zeros((KEYS, _MOST_QUERIES), gl.float32, SUMS))
    scores = mma_v2(k_high, queries[1], scores) * scale
    position = start + gl.arange(0, KEYS, gl.SliceLayout(1, SUMS))
    scores = gl.where(((position >= first) & (position < end))[:, None], scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 0))
    weight = gl.exp2(scores - higher[None, :])
    shrink = gl.exp2(peak - higher)
    share = gl.convert_layout(weight.to(v.dtype), gl.DotOperandLayout(1, SUMS, 2))
    acc = mma_v2(v, share, acc * shrink[None, :])
    return higher, total * shrink, weights * shrink[None, :] + weight, acc


@gluon.jit
def _take_step(
    own, q_stride, head, places, span, last, rope, angles, q_gains, k_gains, eps, scale, shrinks,
    NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, NORM: gl.constexpr,
    DRAFTS: gl.constexpr, SCALED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Queries, the step's key and value, and the sums to begin with: with drafts those of all new keys, where this is
    the `last` piece, which also writes the row's own to their `places` (of keys and values, and of keys as words of
    fp8). `span`: position of the first new key, of the first key that is seen, and how many are new. `scale`: that of
    scores, which queries have in them with fp8. `shrinks`: by what new keys and values are multiplied for the cache."""
    STORED: gl.constexpr = places[0].dtype.element_ty
    FP8: gl.constexpr = places[0].dtype.element_ty == gl.float8e4nv
    KIND: gl.constexpr = gl.float16 if FP8 else STORED
    TURNED_TO: gl.constexpr = gl.float32 if FP8 else STORED
    KEY: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    TURNED: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    turned = scale if FP8 else 1.0
    peak = gl.full((_MOST_QUERIES,), float("-inf"), gl.float32, gl.SliceLayout(0, SUMS))
    total = gl.zeros((_MOST_QUERIES,), gl.float32, gl.SliceLayout(0, SUMS))
    acc = gl.zeros((DIM, _MOST_QUERIES), gl.float32, SUMS)
    raw = _load_queries(own, head, GROUP, DIM, gl.DotOperandLayout(1, SUMS, 8))
    key = own + (NUM_HEADS + head) * DIM
    if DRAFTS:
        fresh, first, count = span
        count = gl.where(last, count, 0)
        before = gl.minimum(1 - count, 0).to(gl.int64) * q_stride
        low, high, value = _load_new(key + before, count, q_stride, NUM_KV, DIM, SUMS)
        queries = _queries(raw, q_gains, angles, eps, turned, DIM, NORM, FP8)
        turns = _new_angles(rope, fresh, count, DIM, KEY)
        if last:
            near, far = _new_keys(low, high, k_gains, turns, eps, DIM, NORM, TURNED_TO)
            near = _in_cache(near, shrinks[0], STORED, SCALED)
            far = _in_cache(far, shrinks[0], STORED, SCALED)
            worth = _in_cache(value, shrinks[1], STORED, SCALED)
            _store_newest(places[0], places[1], near, far, worth, count, DIM, SUMS)
            peak, total, acc = _new_sums(
                near.to(KIND), far.to(KIND), worth.to(KIND), queries, fresh, first, count,
                1.0 if FP8 else scale, DIM, SUMS)
        new = (low, high, value)
    else:
        low, high = _halves(key, DIM, gl.SliceLayout(0, KEY))
        dim = gl.arange(0, DIM, gl.SliceLayout(1, TURNED))
        value = gl.load(key + NUM_KV * DIM + dim)
        queries = _queries(raw, q_gains, angles, eps, turned, DIM, NORM, FP8)
        new = (low, high, value)
        feature = gl.arange(0, DIM // 2, gl.SliceLayout(0, KEY))
        if FP8:
            WORDS: gl.constexpr = gl.SliceLayout(0, TURNED)
            feature = gl.arange(0, DIM // 8, WORDS)
            # Only the last piece looks at them: of the types that they have there.
            nothing = gl.zeros((DIM // 8,), gl.int32, WORDS)
            new = (nothing, nothing, value.to(KIND))
        if last:
            near, far = _new_key(low, high, k_gains, angles, eps, DIM, NORM, TURNED_TO, gl.SliceLayout(0, KEY))
            if FP8:
                near = _words(near, shrinks[0], SUMS)
                far = _words(far, shrinks[0], SUMS)
            worth = _in_cache(value, shrinks[1], STORED, SCALED)
            gl.store(places[2] + feature, near)
            gl.store(places[2] + feature.shape[0] + feature, far)
            gl.store(places[1] + dim, worth)
            new = (near, far, worth.to(KIND))
    return queries, new, peak, total, acc


@gluon.jit(do_not_specialize=["num_parts"])
def few_decode_kernel(
    qkv, k_cache, v_cache, k_words, out, tables, rows, context_len, task_seq, task_piece, piece_count, piece_length,
    partial, summary, arrived, rope, q_norm, k_norm, eps, scale, window, kv_scales, num_parts, q_stride, table_stride,
    NUM_HEADS: gl.constexpr, NUM_KV: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    KEYS: gl.constexpr, STEP: gl.constexpr, HAS_ROWS: gl.constexpr, NORM: gl.constexpr, DRAFTS: gl.constexpr,
    PDL: gl.constexpr, SCALED: gl.constexpr, SUMS: gl.constexpr, VALUE: gl.constexpr, JOIN: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    FP8: gl.constexpr = k_cache.dtype.element_ty == gl.float8e4nv
    KIND: gl.constexpr = gl.float16 if FP8 else k_cache.dtype.element_ty
    KEY: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    READ: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2) if FP8 else KEY
    QUERY: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    head = gl.program_id(0) % NUM_KV
    seq, task, row, length, step = load_task(
        gl.program_id(0) // NUM_KV, task_seq, task_piece, piece_count, piece_length, context_len, rows, HAS_ROWS)
    table = tables + row.to(gl.int64) * table_stride
    first = gl.maximum(length - window, 0)
    begin = first // STEP * STEP + task[1] * step
    newest = gl.maximum(length - 1, 0)
    fresh = newest
    if DRAFTS:
        fresh = gl.maximum(length - _new_of(seq, row, length, rows, context_len, HAS_ROWS, gl.SliceLayout(0, SUMS)), 0)
    # The step's own keys are not in the cache yet.
    old = gl.where(seq >= 0, gl.minimum(begin + step, fresh), 0)
    values = gl.allocate_shared_memory(KIND, [1, KEYS, DIM], SHARED).index(0)
    span = (begin, first, old)
    k_low, k_high, later = _load(span, table, head, k_words, v_cache, NUM_KV, PAGE, DIM, KEYS, READ, VALUE)
    values.store(later.to(KIND))
    k_scale, v_scale = _scales(kv_scales, head, NUM_KV, SCALED)
    block = gl.load(table + newest // PAGE).to(gl.int64)
    place = ((block * NUM_KV + head) * PAGE + newest % PAGE) * DIM
    angles = _halves(rope + newest * DIM, DIM, gl.SliceLayout(1, QUERY))
    q_gains = angles
    k_gains = angles
    if NORM:
        q_gains = _halves(q_norm, DIM, gl.SliceLayout(1, QUERY))
        k_gains = _halves(k_norm, DIM, gl.SliceLayout(0, KEY))
    last = begin + step >= length
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if seq >= 0:
        own = qkv + seq.to(gl.int64) * q_stride
        end = gl.minimum(begin + step, length)
        queries, new, peak, total, acc = _take_step(
            own, q_stride, head, (k_cache + place, v_cache + place, k_words + (place // 4 if FP8 else place)),
            (fresh, first, length - fresh), last, rope, angles, q_gains, k_gains, eps, scale * k_scale,
            (1.0 / k_scale, 1.0 / v_scale), NUM_HEADS, NUM_KV, GROUP, DIM, NORM, DRAFTS, SCALED, SUMS)
        weights = gl.zeros((KEYS, _MOST_QUERIES), gl.float32, SUMS)
        stop = end
        if DRAFTS:
            stop = old
        for start in range(begin, stop, KEYS):
            more = start + KEYS < stop
            tile = (k_low, k_high)
            if more:
                k_low, k_high, later = _load(
                    (start + KEYS, first, old), table, head, k_words, v_cache, NUM_KV, PAGE, DIM, KEYS, READ, VALUE)
            peak, total, weights, acc = _add_tile(
                tile, queries, new, values, (peak, total, weights, acc), start, newest, first, stop,
                length, 1.0 if FP8 else scale, KEYS, SUMS, DRAFTS)
            if more:
                values.store(later.to(KIND))
        if SCALED:
            acc = acc * v_scale
        total += gl.sum(weights, 0)
        _finish(acc, peak, total, out, seq.to(gl.int64), head, task,
                (partial, summary, arrived, num_parts), NUM_HEADS, NUM_KV, GROUP, DIM, SUMS, JOIN)  # fmt: skip
