"""Where top_k, top_p and min_p cut a row, found without sorting it.

Two passes over the logits narrow the cut down: each sums the weight (or the number) of the tokens above a few pivots,
and the next pass puts its pivots between the two that enclose the cut. The tokens that are left between two pivots are
collected, and a binary search among them finds the cut: exact, since weights are integers, and the same whatever the
order in which programs run.
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
PIVOTS = 15
"""Of a pass."""
_PIVOTS = tl.constexpr(PIVOTS)
_LEVEL = tl.constexpr(PIVOTS + 1)
SUM_WORDS = 2 * (PIVOTS + 1) + 2
"""int64 words of a row: for each pass the sums above its pivots and of all tokens; then how many tokens were collected,
and how many are better than the drawn one."""
SUMS = tl.constexpr(SUM_WORDS)
TOTAL = tl.constexpr(PIVOTS)
CURSOR = tl.constexpr(2 * (PIVOTS + 1))
BETTER = tl.constexpr(2 * (PIVOTS + 1) + 1)


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
def _first_pivot(place):
    """How far under the largest logit the pivots of the first pass lie, over the temperature. Behind the last one
    tokens have no weight."""
    near = tl.where(place < 2, 0.25 * (place + 1), 0.5 * place)
    far = tl.where(place == 7, 4.0, tl.where(place == 8, 5.0, 6.5))
    farther = tl.where(place == 10, 8.0, tl.where(place == 11, 10.5, 14.0))
    last = tl.where(place == 13, 20.0, 28.0)
    return tl.where(place < 7, near, tl.where(place < 10, far, tl.where(place < 13, farther, last)))


@triton.jit
def _wanted(me, row, sums, RANKED: tl.constexpr):
    """(Whether tokens are counted or weighed, how much the kept ones before the last are less than.)"""
    if RANKED:
        count = tl.load(me + _LOGPROBS)
    else:
        count = tl.load(me + _TOP_K)
    by_count = count > 0
    share = top_p_of(me) * tl.load(sums + row * SUMS + TOTAL).to(tl.float64)
    return by_count, tl.where(by_count, count.to(tl.float64), share)


@triton.jit
def _between(row, sums, pivots, wanted, low, high, LEVEL: tl.constexpr):
    """The two pivots of a pass that enclose the cut; where there is none on a side, `low` or `high`."""
    place = tl.arange(0, _LEVEL)
    above = tl.load(sums + row * SUMS + LEVEL * _LEVEL + place)
    pivot = tl.load(pivots + (row * 2 + LEVEL) * _LEVEL + place)
    over = tl.sum(((place < _PIVOTS) & (above.to(tl.float64) < wanted)).to(tl.int32))
    if over < _PIVOTS:
        low = tl.max(tl.where(place == over, pivot, float("-inf")))
    if over > 0:
        high = tl.min(tl.where(place == over - 1, pivot, float("inf")))
    return low, high


@triton.jit
def bracket(me, row, top, sums, pivots, RANKED: tl.constexpr):
    """(low, high): the cut lies in the tokens with low < logit <= high; all above are kept. Where a number of tokens is
    wanted there is no upper end: all of them are in question. A row without a cut has nothing in question."""
    low, high = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    if is_cut(me, RANKED) & is_finite(top):
        by_count, wanted = _wanted(me, row, sums, RANKED)
        low, high = _between(row, sums, pivots, wanted, tl.full([], float("-inf"), tl.float32), top, 0)
        low, high = _between(row, sums, pivots, wanted, low, high, 1)
        high = tl.where(by_count, float("inf"), high)
        if RANKED:
            low = tl.where(by_count, low, float("inf"))
            high = tl.where(by_count, high, float("inf"))
    return low, high


@triton.jit
def narrow_kernel(
    logits, edited, stage, peak, sums, pivots, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, LEVEL: tl.constexpr, SOURCE: tl.constexpr,
    RANKED: tl.constexpr,
):  # fmt: skip
    """Sum the weight or the number of a block's tokens above each pivot of a pass, and the weight of them all."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if is_cut(me, RANKED) & is_finite(top):
        temperature = row_temperature(me, RANKED)
        floor = row_floor(me, top, temperature, RANKED)
        by_count, wanted = _wanted(me, row, sums, RANKED)
        place = tl.arange(0, _LEVEL)
        if LEVEL == 0:
            pivot = top - temperature * _first_pivot(place)
        else:
            low, high = _between(row, sums, pivots, wanted, tl.full([], float("-inf"), tl.float32), top, 0)
            low = tl.where(low > float("-inf"), low, high - 112.0 * temperature)
            pivot = high - (high - low) * ((place + 1).to(tl.float32) * 0.0625)
        if block == 0:
            tl.store(pivots + (row * 2 + LEVEL) * _LEVEL + place, pivot)
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        weights = integer_weights(values, top, temperature, floor)
        mine = sums + row * SUMS + LEVEL * _LEVEL
        if LEVEL == 0:
            tl.atomic_add(mine + TOTAL, tl.sum(weights))
        measure = tl.where(by_count, (values > float("-inf")).to(tl.int64), weights)
        for index in tl.static_range(_PIVOTS):
            at = tl.max(tl.where(place == index, pivot, float("-inf")))
            tl.atomic_add(mine + index, tl.sum(tl.where(values > at, measure, 0)))


@triton.jit
def collect(values, token, inside, found, ids, cursor, row, CAPACITY: tl.constexpr):
    """Add some tokens of a block to the row's collection, in any order. More than fit are counted only."""
    place = tl.atomic_add(cursor + token * 0, inside.to(tl.int64), mask=inside)
    inside = inside & (place < CAPACITY)
    tl.store(found + row * CAPACITY + place, values, mask=inside)
    tl.store(ids + row * CAPACITY + place, token, mask=inside)


@triton.jit
def weigh_kernel(
    logits, edited, stage, peak, weight, sums, pivots, found, ids, stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr, CUT: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The weight of a block's tokens above those in question, which are collected."""
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
            low, high = bracket(me, row, top, sums, pivots, False)
            inside = (values > low) & (values <= high) & (weights > 0)
            collect(values, token, inside, found, ids, sums + row * SUMS + CURSOR, row, CAPACITY)
            weights = tl.where(values > high, weights, 0)
        tl.store(weight + row * BLOCKS + block, tl.sum(weights))


@triton.jit
def chunk_of(
    start, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Some tokens in question: (logits, ids, which of these are real), collected or else out of the row itself."""
    count, fits, low, high, top, temperature, floor = settings
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
        if not RANKED:
            real = real & (integer_weights(values, top, temperature, floor) > 0)
    return values, token, real
