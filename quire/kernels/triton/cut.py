"""Where top_k, top_p and min_p cut a row, found without sorting it.

Tokens go into bins by their logit. Counts of the bins bound the weight before each, so they tell the few bins in which
the last kept token can be. The tokens of those bins are collected, and a binary search among them finds the cut: exact,
since weights are integers, and the same whatever the order in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.sampling_parts import (
    HEAD,
    WORDS,
    bin_of,
    integer_weights,
    is_finite,
    key_value,
    load_float,
    order_key,
    read_logits,
    row_peak,
)

_OWNER = tl.constexpr(sampled_row.OWNER)
_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
_LOG_MIN_P = tl.constexpr(sampled_row.LOG_MIN_P)
_TOP_K = tl.constexpr(sampled_row.TOP_K)
_TOP_P = tl.constexpr(sampled_row.TOP_P)
_LOGPROBS = tl.constexpr(sampled_row.LOGPROBS)
TALLY_WORDS = 8
"""Behind a row's bins: their total weight (two words), how many tokens were collected, how many are better."""


@triton.jit
def row_temperature(me, RANKED: tl.constexpr):
    """RANKED: for log-probabilities, which know neither temperature nor min_p."""
    if RANKED:
        temperature = 1.0
    else:
        temperature = load_float(me + _TEMPERATURE)
    return temperature


@triton.jit
def row_floor(me, peak, temperature, RANKED: tl.constexpr):
    """Logits under this have less than min_p of the likeliest token's probability."""
    if RANKED:
        floor = float("-inf")
    else:
        floor = peak + temperature * load_float(me + _LOG_MIN_P)
    return floor


@triton.jit
def top_p_of(me):
    low = tl.load(me + _TOP_P).to(tl.int64) & 0xFFFFFFFF
    return ((tl.load(me + _TOP_P + 1).to(tl.int64) << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def is_cut(me, RANKED: tl.constexpr):
    """Whether the likeliest tokens of a row are to be found: to draw from them, or to report them."""
    if RANKED:
        cut = (tl.load(me + _OWNER) >= 0) & (tl.load(me + _LOGPROBS) >= 0)
    else:
        limited = (tl.load(me + _TOP_K) > 0) | (top_p_of(me) < 2.0)
        cut = (tl.load(me + _OWNER) >= 0) & (load_float(me + _TEMPERATURE) > 0) & limited
    return cut


@triton.jit
def histogram_kernel(
    logits, edited, stage, peak, tally, tally_wide, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, TALLY: tl.constexpr,
    PARTS: tl.constexpr, SOURCE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """How many tokens each bin holds, and the weight of them all. A program looks at every PARTS-th block."""
    part, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if is_cut(me, RANKED) & is_finite(top):
        temperature = row_temperature(me, RANKED)
        floor = row_floor(me, top, temperature, RANKED)
        bins = tl.arange(0, BINS)
        counts = tl.zeros([BINS], tl.int32)
        total = tl.sum(tl.zeros([2], tl.int64))
        for block in range(part, BLOCKS, PARTS):
            token = block * BLOCK + tl.arange(0, BLOCK)
            values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
            total += tl.sum(integer_weights(values, top, temperature, floor))
            counts += tl.histogram(bin_of(values, top, temperature, floor, BINS), BINS)
        tl.atomic_add(tally + row * TALLY + bins, counts, mask=counts > 0)
        tl.atomic_add(tally_wide + (row * TALLY + BINS) // 2, total)


@triton.jit
def bracket_kernel(
    stage, peak, tally, tally_wide, bracket, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BINS: tl.constexpr,
    TALLY: tl.constexpr, CAPACITY: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """First and last bin that the cut may be in, and whether all that is in them can be collected. Without a cut the
    first is past the last bin: all tokens come before it."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    first = tl.full([], BINS, tl.int32)
    last = tl.full([], -1, tl.int32)
    fits = tl.full([], 1, tl.int32)
    if is_cut(me, RANKED) & is_finite(row_peak(peak, row, BLOCKS, BLOCKS_POW)):
        bins = tl.arange(0, BINS)
        counts = tl.load(tally + row * TALLY + bins)
        before = tl.cumsum(counts, axis=0)
        if RANKED:
            wanted = tl.load(me + _LOGPROBS)
            first = tl.full([], 0, tl.int32)
            last = tl.where(wanted > 0, tl.minimum(tl.sum((before < wanted).to(tl.int32)), BINS - 1), -1)
        else:
            top_k = tl.load(me + _TOP_K)
            if top_k > 0:
                first = tl.full([], 0, tl.int32)
                last = tl.minimum(tl.sum((before < top_k).to(tl.int32)), BINS - 2)
            else:
                # Bounds with room for rounding, and for the fractions that integer weights have lost.
                share = top_p_of(me) * tl.load(tally_wide + (row * TALLY + BINS) // 2).to(tl.float64)
                real = tl.where(bins < BINS - 1, counts, 0).to(tl.float64)
                most = tl.exp(bins.to(tl.float32) * (-1.0 / 72)).to(tl.float64) * 1099511627776.0
                least = tl.exp((bins + 1).to(tl.float32) * (-1.0 / 72)).to(tl.float64) * 1099511627776.0
                upper = tl.cumsum(real * (most * 1.0001 + 1.0), axis=0)
                lower = tl.cumsum(real * tl.maximum(least * 0.9999 - 1.0, 0.0), axis=0)
                first = tl.minimum(tl.sum((upper < share).to(tl.int32)), BINS - 1)
                last = tl.minimum(tl.sum((lower < share).to(tl.int32)), BINS - 2)
        held = tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0))
        fits = (held <= CAPACITY).to(tl.int32)
    tl.store(bracket + row * 4, first)
    tl.store(bracket + row * 4 + 1, last)
    tl.store(bracket + row * 4 + 2, fits)


@triton.jit
def collect(values, token, bins, first, last, found, ids, cursor, row, CAPACITY: tl.constexpr):
    """Add the tokens of a block that lie in the bins `first` to `last` to the row's collection, in any order."""
    inside = (bins >= first) & (bins <= last)
    count = tl.sum(inside.to(tl.int32))
    if count > 0:
        place = row * CAPACITY + tl.atomic_add(cursor, count) + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        tl.store(found + place, values, mask=inside)
        tl.store(ids + place, token, mask=inside)


@triton.jit
def weigh_kernel(
    logits, edited, stage, peak, weight, bracket, tally, found, ids, stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
    TALLY: tl.constexpr, CAPACITY: tl.constexpr, CUT: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The weight of a block's tokens before the bins in question, whose own tokens are collected."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    temperature = load_float(me + _TEMPERATURE)
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if (tl.load(me + _OWNER) >= 0) & (temperature > 0) & is_finite(top):
        floor = row_floor(me, top, temperature, False)
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        weights = integer_weights(values, top, temperature, floor)
        if CUT:
            first, last = tl.load(bracket + row * 4), tl.load(bracket + row * 4 + 1)
            bins = bin_of(values, top, temperature, floor, BINS)
            weights = tl.where(bins < first, weights, 0)
            if tl.load(bracket + row * 4 + 2) != 0:
                collect(values, token, bins, first, last, found, ids, tally + row * TALLY + BINS + 2, row, CAPACITY)
        tl.store(weight + row * BLOCKS + block, tl.sum(weights))


@triton.jit
def chunk_of(
    start, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BINS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Some tokens in question: (logits, ids, which of these are real), collected or else out of the row itself."""
    count, fits, first, last, top, temperature, floor = settings
    logits, edited, stage, found, ids, stride = source
    at = start + tl.arange(0, CHUNK)
    if fits != 0:
        real = at < count
        values = tl.load(found + row * CAPACITY + at, mask=real, other=float("-inf"))
        token = tl.load(ids + row * CAPACITY + at, mask=real, other=VOCAB)
    else:
        values = read_logits(logits, edited, stage, row, at, stride, VOCAB, MASK_WORDS, SOURCE)
        token = at
        bins = bin_of(values, top, temperature, floor, BINS)
        real = (at < VOCAB) & (bins >= first) & (bins <= last)
    return values, token, real


@triton.jit
def _above(
    key, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BINS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Of the tokens in question with a larger logit than `key`: (their weight, their number)."""
    count, top, temperature, floor = settings[0], settings[4], settings[5], settings[6]
    weight = tl.sum(tl.zeros([2], tl.int64))
    number = tl.sum(tl.zeros([2], tl.int32))
    for start in range(0, count, CHUNK):
        values, _token, real = chunk_of(start, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
        over = real & (order_key(values) > key)
        weight += tl.sum(tl.where(over, integer_weights(values, top, temperature, floor), 0))
        number += tl.sum(over.to(tl.int32))
    return weight, number


@triton.jit
def _range(
    row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BINS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The smallest and the largest key in question."""
    low = tl.max(tl.full([2], 2147483647, tl.int32))
    high = tl.max(tl.full([2], -2147483648, tl.int32))
    for start in range(0, settings[0], CHUNK):
        values, _token, real = chunk_of(start, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
        key = order_key(values)
        low = tl.minimum(low, tl.min(tl.where(real, key, 2147483647)))
        high = tl.maximum(high, tl.max(tl.where(real, key, -2147483648)))
    return low, high


@triton.jit
def _weight_of(key, settings):
    """The weight of one token with the logit of `key`."""
    top, temperature, floor = settings[4], settings[5], settings[6]
    return tl.max(integer_weights(tl.zeros([2], tl.float32) + key_value(key), top, temperature, floor))


@triton.jit
def _top_k(
    most, low, high, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BINS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """(Smallest key that fewer than `most` tokens exceed, how many tokens with it are kept, the weight of all kept.)"""
    under, over = low.to(tl.int64), high.to(tl.int64)
    while under < over:
        middle = (under + over) >> 1
        weight, number = _above(middle, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
        fewer = number < most
        over = tl.where(fewer, middle, over)
        under = tl.where(fewer, under, middle + 1)
    key = under.to(tl.int32)
    weight, number = _above(key, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
    _others, through = _above(key - 1, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
    equals = tl.minimum(most, through) - number
    return key, equals, weight + equals.to(tl.int64) * _weight_of(key, settings)


@triton.jit
def _top_p(
    base, wanted, low, high, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BINS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The smallest key before which less than the wanted weight lies."""
    under, over = low.to(tl.int64), high.to(tl.int64)
    while under < over:
        middle = (under + over) >> 1
        weight, _number = _above(middle, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
        less = (base + weight).to(tl.float64) < wanted
        over = tl.where(less, middle, over)
        under = tl.where(less, under, middle + 1)
    return under.to(tl.int32)


@triton.jit
def _last_id(
    base, wanted, key, kth, equals, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BINS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The last id kept of those with `key`: as many as begin before the wanted weight, lower ids first."""
    weight, number = _above(key, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
    _others, through = _above(key - 1, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
    each = _weight_of(key, settings)
    sharing = through - number
    many = tl.where(key == kth, tl.minimum(equals, sharing), sharing)
    kept = many * 0 + 1
    while kept < many:
        middle = (kept + many + 1) >> 1
        begins = (base + weight + (middle - 1).to(tl.int64) * each).to(tl.float64) < wanted
        kept = tl.where(begins, middle, kept)
        many = tl.where(begins, many, middle - 1)
    over = kept * 0 + VOCAB - 1
    under = tl.where(kept == sharing, over, 0)
    while under < over:
        middle = (under + over) >> 1
        number = kept * 0
        for start in range(0, settings[0], CHUNK):
            values, token, real = chunk_of(
                start, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
            number += tl.sum((real & (order_key(values) == key) & (token <= middle)).to(tl.int32))
        enough = number >= kept
        over = tl.where(enough, middle, over)
        under = tl.where(enough, under, middle + 1)
    return under


@triton.jit
def resolve_kernel(
    logits, edited, stage, peak, weight, bracket, tally, tally_wide, found, ids, cut, cut_id, stride,
    VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr, TALLY: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The logit of the last token that is kept, and the last id among those that share it. The weights of the kept ones
    in question are added to their blocks'."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    first, last = tl.load(bracket + row * 4), tl.load(bracket + row * 4 + 1)
    if is_cut(me, False) & is_finite(top) & (first <= last):
        fits = tl.load(bracket + row * 4 + 2)
        temperature = load_float(me + _TEMPERATURE)
        floor = row_floor(me, top, temperature, False)
        count = tl.where(fits != 0, tl.load(tally + row * TALLY + BINS + 2), VOCAB)
        settings = (count, fits, first, last, top, temperature, floor)
        source = (logits, edited, stage, found, ids, stride)
        blocks = tl.arange(0, BLOCKS_POW)
        base = tl.sum(tl.load(weight + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0))
        low, high = _range(row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
        kth, equals = low - 1, count
        total = tl.load(tally_wide + (row * TALLY + BINS) // 2)
        most = tl.load(me + _TOP_K)
        if most > 0:
            kth, equals, total = _top_k(
                most, low, high, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
            low = kth
        wanted = top_p_of(me) * total.to(tl.float64)
        key = _top_p(base, wanted, low, high, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
        last_id = _last_id(
            base, wanted, key, kth, equals, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
        for start in range(0, count, CHUNK):
            values, token, real = chunk_of(
                start, row, settings, source, VOCAB, MASK_WORDS, BINS, CAPACITY, CHUNK, SOURCE)
            mine = order_key(values)
            kept = real & ((mine > key) | ((mine == key) & (token <= last_id)))
            tl.atomic_add(weight + row * BLOCKS + token // BLOCK, integer_weights(values, top, temperature, floor),
                          mask=kept)
        tl.store(cut + row, key_value(key))
        tl.store(cut_id + row, last_id)
    else:
        tl.store(cut + row, float("-inf"))
        tl.store(cut_id + row, VOCAB)
