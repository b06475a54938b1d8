"""Which of a row's collected tokens top_k and top_p keep, found by binary search; these go to their blocks' weights.

A program holds the tokens in registers if they are few enough, as nearly always; else each probe reads them again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.best import NO_WEIGHT
from quire.kernels.triton.sampling_parts import (
    integer_weights,
    key_value,
    load_float,
    min_p_floor,
    order_key,
    read_logits,
    top_p_of,
)

_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
_TOP_K = tl.constexpr(sampled_row.TOP_K)
_NO_KEY = tl.constexpr(-2147483648)
"""Key of places without a token; no logit has it."""


@triton.jit
def chunk_of(
    start, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Some tokens in question: (logits, ids, which of these are real), collected or else out of the row itself."""
    count, fits, low, _top, _temperature, _floor = settings
    logits, edited, stage, found, ids, stride = source
    at = start + tl.arange(0, CHUNK)
    if fits != 0:
        real = at < count
        values = tl.load(found + row * CAPACITY + at, mask=real, other=float("-inf"))
        token = tl.load(ids + row * CAPACITY + at, mask=real, other=VOCAB)
    else:
        values = read_logits(logits, edited, stage, row, at, stride, VOCAB, MASK_WORDS, SOURCE)
        token = at
        real = (at < VOCAB) & (values > low)
    return values, token, real


@triton.jit
def _tokens(start, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
            CHUNK: tl.constexpr, SOURCE: tl.constexpr):  # fmt: skip
    """(Keys, weights, ids) of some tokens in question; those without weight are none."""
    values, token, real = chunk_of(start, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
    weights = integer_weights(values, settings[3], settings[4], settings[5])
    real = real & (weights > 0)
    return tl.where(real, order_key(values), _NO_KEY), tl.where(real, weights, 0), token


@triton.jit(noinline=True)
def _pass(
    key, last, row, count, fits, low, top, temperature, floor, logits, edited, stage, found, ids, stride,
    VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Reads the tokens in question once: (weight and number of those with a larger key; number of those with this key
    and no larger id than `last`). A function of its own: put in every place that asks, it would be most of the
    kernel, and two thirds of the time to compile it."""
    settings, source = (count, fits, low, top, temperature, floor), (logits, edited, stage, found, ids, stride)
    weight = tl.sum(tl.zeros([2], tl.int64))
    number = tl.sum(tl.zeros([2], tl.int32))
    sharing = tl.sum(tl.zeros([2], tl.int32))
    for start in range(0, count, CHUNK):
        keys, weights, token = _tokens(start, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
        over = keys > key
        weight += tl.sum(tl.where(over, weights, 0))
        number += tl.sum(over.to(tl.int32))
        sharing += tl.sum(((keys == key) & (token <= last)).to(tl.int32))
    return weight, number, sharing


@triton.jit
def _passed(
    key, last, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    return _pass(
        key, last, row, settings[0], settings[1], settings[2], settings[3], settings[4], settings[5], source[0],
        source[1], source[2], source[3], source[4], source[5], VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)


@triton.jit
def _above(
    key, held, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Of the tokens in question with a larger key: (their weight, their number)."""
    if HELD:
        over = held[0] > key
        weight, number = tl.sum(tl.where(over, held[1], 0)), tl.sum(over.to(tl.int32))
    else:
        weight, number, _sharing = _passed(
            key, row * 0, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
    return weight, number


@triton.jit
def _equal_up_to(
    key, last, held, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """How many tokens have this key, and no larger id than `last`."""
    if HELD:
        number = tl.sum(((held[0] == key) & (held[2] <= last)).to(tl.int32))
    else:
        _weight, _number, number = _passed(
            key, row * 0 + last, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
    return number


@triton.jit
def _range(
    held, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The smallest and the largest key in question."""
    if HELD:
        low = tl.min(tl.where(held[0] == _NO_KEY, 2147483647, held[0]))
        high = tl.max(held[0])
    else:
        low = tl.max(tl.full([2], 2147483647, tl.int32))
        high = tl.max(tl.full([2], -2147483648, tl.int32))
        for start in range(0, settings[0], CHUNK):
            keys, _weights, _token = _tokens(
                start, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
            low = tl.minimum(low, tl.min(tl.where(keys == _NO_KEY, 2147483647, keys)))
            high = tl.maximum(high, tl.max(keys))
    return low, high


@triton.jit
def _weight_of(key, settings):
    """The weight of one token with the logit of `key`."""
    weights = integer_weights(tl.zeros([2], tl.float32) + key_value(key), settings[3], settings[4], settings[5])
    return tl.max(weights)


@triton.jit
def _quarter(under, over, first, second, third, less1, less2, less3):
    """The end of the interval that the search continues with: the smallest of three ascending keys that is small
    enough."""
    low = tl.where(less1, under, tl.where(less2, first + 1, tl.where(less3, second + 1, third + 1)))
    high = tl.where(less1, first, tl.where(less2, second, tl.where(less3, third, over)))
    return low, high


@triton.jit
def _measured_above(
    key, held, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """The weight, or the number, of the tokens in question with a larger key."""
    weight, number = _above(
        key.to(tl.int32), held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
    if BY_COUNT:
        measure = number.to(tl.float64)
    else:
        measure = weight.to(tl.float64)
    return measure


@triton.jit
def _probed_key(
    wanted, low, high, held, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr, BY_COUNT: tl.constexpr,
):  # fmt: skip
    """The smallest key above which less than `wanted` lies. Three probes at once, independent of each other."""
    under, over = low.to(tl.int64), high.to(tl.int64)
    while under < over:
        quarter = (over - under) >> 2
        first, second, third = under + quarter, (under + over) >> 1, over - 1 - quarter
        above1 = _measured_above(
            first, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD, BY_COUNT)
        above2 = _measured_above(
            second, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD, BY_COUNT)
        above3 = _measured_above(
            third, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD, BY_COUNT)
        under, over = _quarter(under, over, first, second, third, above1 < wanted, above2 < wanted, above3 < wanted)
    return under.to(tl.int32)


@triton.jit
def _over_pivots(keys, weights, pivots, BY_COUNT: tl.constexpr):
    """[8]: the weight, or the number, of the tokens with a larger key than each pivot."""
    over = keys[None, :] > pivots[:, None]
    if BY_COUNT:
        sums = tl.sum(over.to(tl.int32), axis=1).to(tl.int64)
    else:
        sums = tl.sum(tl.where(over, weights[None, :], 0), axis=1)
    return sums


@triton.jit
def _smallest_key(wanted, low, high, keys, weights, BY_COUNT: tl.constexpr):
    """The smallest key above which less than `wanted` lies, of tokens in registers; eight pivots a look."""
    under, over = low.to(tl.int64), high.to(tl.int64)
    eighths = (tl.arange(0, 8) + 1).to(tl.int64)
    while under < over:
        pivots = under + (((over - under) * eighths) >> 3)
        less = _over_pivots(keys, weights, pivots.to(tl.int32), BY_COUNT).to(tl.float64) < wanted
        under = tl.max(tl.where(less, under, pivots + 1))
        over = tl.min(tl.where(less, pivots, over))
    return under.to(tl.int32)


@triton.jit
def _top_k(
    most, low, high, held, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """(Smallest key that fewer than `most` tokens exceed, how many tokens with it are kept, the weight of all kept.)"""
    if EIGHT:
        key = _smallest_key(most.to(tl.float64), low, high, held[0], held[1], True)
    else:
        key = _probed_key(most.to(tl.float64), low, high, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY,
                          CHUNK, SOURCE, HELD, True)
    weight, before = _above(key, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
    sharing = _equal_up_to(
        key, VOCAB, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
    equals = tl.minimum(most, before + sharing) - before
    return key, equals, weight + equals.to(tl.int64) * _weight_of(key, settings)


@triton.jit
def _last_id(
    wanted, key, kth, equals, held, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """The last id kept of those with `key`: as many as begin before the wanted weight, lower ids first."""
    weight, _number = _above(key, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
    sharing = _equal_up_to(
        key, VOCAB, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
    each = _weight_of(key, settings)
    many = tl.where(key == kth, tl.minimum(equals, sharing), sharing)
    kept = many * 0 + 1
    while kept < many:
        middle = (kept + many + 1) >> 1
        begins = (weight + (middle - 1).to(tl.int64) * each).to(tl.float64) < wanted
        kept = tl.where(begins, middle, kept)
        many = tl.where(begins, many, middle - 1)
    over = kept * 0 + VOCAB - 1
    under = tl.where(kept == sharing, over, 0)
    while under < over:
        middle = (under + over) >> 1
        number = _equal_up_to(
            key, middle, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
        enough = number >= kept
        over = tl.where(enough, middle, over)
        under = tl.where(enough, under, middle + 1)
    return under


@triton.jit
def _search(
    me, row, settings, source, weight, BLOCK: tl.constexpr, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr, HELD: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """(Key of the last kept token, last id among those that share it); the blocks get the weights of the kept ones."""
    held = _tokens(0, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
    low, high = _range(held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
    kth, equals, total = _top_k(
        tl.load(me + _TOP_K), low, high, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD,
        EIGHT)
    wanted = top_p_of(me) * total.to(tl.float64)
    if EIGHT:
        key = _smallest_key(wanted, kth, high, held[0], held[1], False)
    else:
        key = _probed_key(wanted, kth, high, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE,
                          HELD, False)
    last_id = _last_id(
        wanted, key, kth, equals, held, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE, HELD)
    if HELD:
        kept = (held[0] > key) | ((held[0] == key) & (held[2] <= last_id))
        tl.atomic_add(weight + row * BLOCKS + held[2] // BLOCK, held[1], mask=kept & (held[0] != _NO_KEY))
    else:
        for start in range(0, settings[0], CHUNK):
            keys, weights, token = _tokens(
                start, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
            kept = (keys > key) | ((keys == key) & (token <= last_id))
            tl.atomic_add(weight + row * BLOCKS + token // BLOCK, weights, mask=kept)
    return key, last_id


@triton.jit
def find_cut(
    me, row, top, cursor, bound, weight, source, BLOCK: tl.constexpr, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """(Logit of the last token that top_k and top_p keep, last id among those that share it.) Up to FEW collected
    tokens, or up to MANY, are held in registers."""
    temperature = load_float(me + _TEMPERATURE)
    floor = min_p_floor(me, top, temperature)
    collected, low = tl.load(cursor + row), tl.load(bound + row)
    # Fewer than are wanted are all there are if none with weight lies below; else every token is in question.
    missed = (collected < tl.load(me + _TOP_K)) & (low >= tl.maximum(floor, top - NO_WEIGHT * temperature))
    low = tl.where(missed, float("-inf"), low)
    fits = ((missed == 0) & (collected <= CAPACITY)).to(tl.int32)
    settings = (tl.where(fits != 0, collected, VOCAB), fits, low, top, temperature, floor)
    if settings[0] <= FEW:
        key, last_id = _search(me, row, settings, source, weight, BLOCK, VOCAB, MASK_WORDS, BLOCKS, CAPACITY, FEW,
                               SOURCE, True, True)
    elif settings[0] <= MANY:
        key, last_id = _search(me, row, settings, source, weight, BLOCK, VOCAB, MASK_WORDS, BLOCKS, CAPACITY, MANY,
                               SOURCE, True, False)
    else:
        key, last_id = _search(me, row, settings, source, weight, BLOCK, VOCAB, MASK_WORDS, BLOCKS, CAPACITY, MANY,
                               SOURCE, False, False)
    return key_value(key), last_id
