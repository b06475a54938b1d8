"""Where top_k, top_p and min_p cut a row, found without sorting it.

A sample of the row, with the largest logit of every block, gives a guess of the cut. One pass over the logits sums the
weight (or the number) of the tokens above a few pivots, most of them near the guess. Where too many tokens are left
between the two that enclose the cut, a second pass puts its pivots there. The tokens that are left are collected, and
a search among them finds the cut: exact, since weights are integers there, and the same whatever the order in which
programs run. Sums above pivots are rounded, so a pivot counts only if it clears the cut by more than that rounding.
Blocks are read by one warp each, which needs no barrier to sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.sampling_parts import (
    HEAD,
    WORDS,
    integer_weights,
    is_finite,
    load_float,
    read_logits,
    row_peak,
)

_OWNER = tl.constexpr(sampled_row.OWNER)
_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
_LOG_MIN_P = tl.constexpr(sampled_row.LOG_MIN_P)
_TOP_K = tl.constexpr(sampled_row.TOP_K)
_TOP_P = tl.constexpr(sampled_row.TOP_P)
_LOGPROBS = tl.constexpr(sampled_row.LOGPROBS)
PIVOTS = 11
"""Of a pass."""
LEVELS = 2
"""Passes."""
_SAMPLE = tl.constexpr(8192)
"""Tokens of a row that the guess looks at, at most."""
_LOOKS = tl.constexpr(14)
"""Halvings of the range that has weight: the guess is good to a six-hundredth of the temperature."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEVELS = tl.constexpr(LEVELS)
_PIVOTS = tl.constexpr(PIVOTS)
LEVEL_WORDS = 16
"""Room for the sums of a pass."""
_LEVEL = tl.constexpr(LEVEL_WORDS)
SUM_WORDS = 4
"""int64 words of a row: the weight of all tokens, how many were collected, how many are better than the drawn one; and
one that is free."""
SUMS = tl.constexpr(SUM_WORDS)
TOTAL = tl.constexpr(0)
CURSOR = tl.constexpr(1)
BETTER = tl.constexpr(2)
_SURE = tl.constexpr(2e-4)
"""Sums above pivots are float32: the cut is enclosed by pivots that are sure by more than all their rounding."""


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
def _first_pivot(index: tl.constexpr, top, temperature, guess):
    """The pivots of the first pass: six about the guess, five over the whole row. Behind the last one tokens have no
    weight."""
    near: tl.constexpr = (0.01, 0.035, 0.12)
    far: tl.constexpr = (0.7, 2.0, 4.5, 9.0, 28.0)
    if index < 3:
        at = guess + temperature * near[index]
    elif index < 6:
        at = guess - temperature * near[index - 3]
    else:
        at = top - temperature * far[index - 6]
    return at


@triton.jit
def _wanted(me, row, sums, RANKED: tl.constexpr):
    """(Whether tokens are counted or weighed, how much the kept ones before the last are less than.)"""
    if RANKED:
        count = tl.load(me + _LOGPROBS)
    else:
        count = tl.load(me + _TOP_K)
    by_count = count > 0
    share = top_p_of(me) * tl.load(sums + row * SUMS + TOTAL).to(tl.float64) * (1.0 / 1099511627776.0)
    return by_count, tl.where(by_count, count.to(tl.float64), share).to(tl.float32)


@triton.jit
def _between(row, above, pivots, by_count, wanted, low, high, LEVEL: tl.constexpr):
    """The two pivots of a pass that enclose the cut; where there is none on a side, `low` or `high`. Numbers of tokens
    are exact, and half a token is margin enough."""
    place = tl.arange(0, _LEVEL)
    sums = tl.load(above + (row * _LEVELS + LEVEL) * _LEVEL + place)
    pivot = tl.load(pivots + (row * _LEVELS + LEVEL) * _LEVEL + place)
    real = place < _PIVOTS
    surely_less = sums < tl.where(by_count, wanted - 0.5, wanted * (1 - _SURE))
    maybe_less = sums < tl.where(by_count, wanted - 0.5, wanted * (1 + _SURE))
    high = tl.min(tl.where(real & surely_less, pivot, high))
    return tl.max(tl.where(real & (maybe_less == 0), pivot, low)), high


@triton.jit
def _few_left(row, above, pivots, by_count, low, high, top, temperature, MANY: tl.constexpr):
    """Whether some MANY tokens or fewer are in question after the first pass. Weights between near pivots are alike."""
    place = tl.arange(0, _LEVEL)
    sums = tl.load(above + row * _LEVELS * _LEVEL + place)
    pivot = tl.load(pivots + row * _LEVELS * _LEVEL + place)
    under = tl.max(tl.where((place < _PIVOTS) & (pivot == low), sums, 0.0))
    over = tl.max(tl.where((place < _PIVOTS) & (pivot == high), sums, 0.0))
    left = tl.where(by_count, under, (under - over) / tl.maximum(tl.exp((low - top) / temperature), 1e-30))
    return (low > float("-inf")) & (left <= MANY)


@triton.jit
def find_bracket(me, row, top, sums, above, pivots, bracket, block, RANKED: tl.constexpr):
    """Of a row (low, high): the cut lies in the tokens with low < logit <= high; all above are kept. Where a number of
    tokens is wanted there is no upper end: all of them are in question. A row without a cut has nothing in question.
    Block 0 writes it down for later launches."""
    low, high = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    if is_cut(me, RANKED) & is_finite(top):
        by_count, wanted = _wanted(me, row, sums, RANKED)
        low, high = _between(row, above, pivots, by_count, wanted, tl.full([], float("-inf"), tl.float32), top, 0)
        low, high = _between(row, above, pivots, by_count, wanted, low, high, 1)
        high = tl.where(by_count, float("inf"), high)
        if RANKED:
            low = tl.where(by_count, low, float("inf"))
            high = tl.where(by_count, high, float("inf"))
    if block == 0:
        tl.store(bracket + row * 2, low)
        tl.store(bracket + row * 2 + 1, high)
    return low, high


@triton.jit
def guess_kernel(
    logits, edited, stage, peak, sums, above, guess, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, SOURCE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Where the cut of a row probably lies: some tokens of every block stand for its others, its largest for itself.
    Also empties the row's sums."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    tl.store(sums + row * SUMS + tl.arange(0, SUMS), tl.zeros([SUMS], tl.int64))
    tl.store(above + row * _LEVELS * _LEVEL + tl.arange(0, _LEVELS * _LEVEL), tl.zeros([_LEVELS * _LEVEL], tl.float32))
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if is_cut(me, RANKED) & is_finite(top):
        each: tl.constexpr = min(BLOCK, max(_SAMPLE // BLOCKS_POW, 1))
        temperature = row_temperature(me, RANKED)
        floor = row_floor(me, top, temperature, RANKED)
        if RANKED:
            count = tl.load(me + _LOGPROBS)
        else:
            count = tl.load(me + _TOP_K)
        blocks = tl.arange(0, BLOCKS_POW)
        peaks = tl.load(peak + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
        peak_measure = measured(peaks, top, temperature, floor, count)
        place = tl.arange(0, BLOCKS_POW * each)
        block = place // each
        token = block * BLOCK + (BLOCK - each) // 2 + place % each
        values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        largest = tl.load(peak + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
        measure = measured(values, top, temperature, floor, count) * (BLOCK / each)
        measure = tl.where((values < largest) & (values > float("-inf")), measure, 0.0)
        wanted = count.to(tl.float32)
        if count <= 0:
            wanted = top_p_of(me).to(tl.float32) * (tl.sum(measure) + tl.sum(peak_measure))
        low, high = top - 28.0 * temperature, top
        for _ in range(_LOOKS):
            middle = (low + high) * 0.5
            over = tl.sum(tl.where(values > middle, measure, 0.0)) + tl.sum(tl.where(peaks > middle, peak_measure, 0.0))
            high = tl.where(over < wanted, middle, high)
            low = tl.where(over < wanted, low, middle)
        tl.store(guess + row, (low + high) * 0.5)


@triton.jit
def measured(values, top, temperature, floor, count):
    """What tokens add to the sums above pivots: one each where a number is wanted, else roughly their weight."""
    weights = tl.where(values >= floor, tl.exp2((values - top) * (_LOG2_E / temperature)), 0.0)
    return tl.where(count > 0, tl.where(values > float("-inf"), 1.0, 0.0), weights)


@triton.jit
def narrow_kernel(
    logits, edited, stage, peak, sums, above, pivots, guess, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr, LEVEL: tl.constexpr,
    SOURCE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Sum the weight or the number of a block's tokens above each pivot of a pass; in the first, also of them all. The
    second is for rows of which more than MANY would be left."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if is_cut(me, RANKED) & is_finite(top):
        temperature = row_temperature(me, RANKED)
        floor = row_floor(me, top, temperature, RANKED)
        by_count, wanted = _wanted(me, row, sums, RANKED)
        low, high = tl.full([], float("-inf"), tl.float32), top
        guessed = tl.load(guess + row)
        done = by_count & False
        if LEVEL == 1:
            low, high = _between(row, above, pivots, by_count, wanted, low, high, 0)
            done = _few_left(row, above, pivots, by_count, low, high, top, temperature, MANY)
            low = tl.where(low > float("-inf"), low, high - 112.0 * temperature)
        place = tl.arange(0, _LEVEL)
        mine = (row * _LEVELS + LEVEL) * _LEVEL + place
        if done:
            if block == 0:
                tl.store(pivots + mine, tl.full([_LEVEL], float("inf"), tl.float32))
        else:
            token = block * BLOCK + tl.arange(0, BLOCK)
            values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
            if LEVEL == 0:
                tl.atomic_add(sums + row * SUMS + TOTAL, tl.sum(integer_weights(values, top, temperature, floor)))
            measure = measured(values, top, temperature, floor, by_count.to(tl.int32))
            found = tl.zeros([_LEVEL], tl.float32)
            pivot = tl.zeros([_LEVEL], tl.float32)
            for index in tl.static_range(_PIVOTS):
                if LEVEL == 0:
                    at = _first_pivot(index, top, temperature, guessed)
                else:
                    at = high - (high - low) * ((index + 1) / (_PIVOTS + 1))
                over = tl.sum(tl.where(values > at, measure, 0.0))
                found = tl.where(place == index, over, found)
                pivot = tl.where(place == index, at, pivot)
            tl.atomic_add(above + mine, found, mask=found > 0)
            if block == 0:
                tl.store(pivots + mine, pivot)


@triton.jit
def collect(values, token, inside, found, ids, cursor, row, CAPACITY: tl.constexpr):
    """Add some tokens of a block to the row's collection, in any order. More than fit are counted only."""
    count = tl.sum(inside.to(tl.int32))
    if count > 0:
        place = tl.atomic_add(cursor + tl.zeros_like(token), 1, mask=inside).to(tl.int32)
        inside = inside & (place < CAPACITY)
        tl.store(found + row * CAPACITY + place, values, mask=inside)
        tl.store(ids + row * CAPACITY + place, token, mask=inside)


@triton.jit
def weigh_kernel(
    logits, edited, stage, peak, weight, sums, above, pivots, bracket, found, ids, stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr, CUT: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The weight of a block's tokens above those in question, which are collected."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    temperature = load_float(me + _TEMPERATURE)
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if CUT:
        low, high = find_bracket(me, row, top, sums, above, pivots, bracket, block, False)
    if (tl.load(me + _OWNER) >= 0) & (temperature > 0) & is_finite(top):
        floor = row_floor(me, top, temperature, False)
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        weights = integer_weights(values, top, temperature, floor)
        if CUT:
            weights = tl.where(values > high, weights, 0)
        tl.store(weight + row * BLOCKS + block, tl.sum(weights))
        if CUT:
            # What lies lower has no weight; of the rest the search leaves out what has none.
            least = tl.maximum(floor, top - 28.0 * temperature)
            inside = (values > low) & (values <= high) & (values >= least)
            collect(values, token, inside, found, ids, sums + row * SUMS + CURSOR, row, CAPACITY)


@triton.jit
def chunk_of(
    start, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Some tokens in question: (logits, ids, which of these are real), collected or else out of the row itself."""
    count, fits, low, high, _top, _temperature, _floor = settings
    logits, edited, stage, found, ids, stride = source
    at = start + tl.arange(0, CHUNK)
    if fits != 0:
        real = at < count
        values = tl.load(found + row * CAPACITY + at, mask=real, other=float("-inf"))
        token = tl.load(ids + row * CAPACITY + at, mask=real, other=VOCAB)
    else:
        values = read_logits(logits, edited, stage, row, at, stride, VOCAB, MASK_WORDS, SOURCE)
        token = at
        real = (at < VOCAB) & (values > low) & (values <= high)
    return values, token, real
