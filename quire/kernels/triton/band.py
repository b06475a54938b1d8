"""Where top_k, top_p and the likeliest tokens end, by one pass over the logits where `cut.py` takes two or three.

The largest logits of small groups of tokens, and a sample of the others, say between which two logits the cut lies: a
band wide enough for the error of that guess. Where that would be too many tokens, since most weigh about the same, a
larger sample (`band_refine.py`) makes the guess finer. One pass over the logits sums the weights above the band and
collects the tokens in it; the search among these (`band_search.py`) is exact, and knows from the sums whether the cut
lies there at all. If not it reads the row itself: slower, the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.band_refine import BESIDE, refined_band
from quire.kernels.triton.cut import is_cut, measured, row_floor, row_temperature, top_p_of
from quire.kernels.triton.report import drawn_token
from quire.kernels.triton.sampling_parts import (
    HEAD,
    WORDS,
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
_TOP_K = tl.constexpr(sampled_row.TOP_K)
_LOGPROBS = tl.constexpr(sampled_row.LOGPROBS)
SUBS = 8
"""Groups of a block whose largest logit is kept."""
_SHARE = tl.constexpr(32)
"""One in so many tokens of a group is sampled."""
_ROUNDS = tl.constexpr(7)
"""Of a search with four pivots: good to a six-hundredth of the temperature."""
_SIGMAS = tl.constexpr(4.0)
_ROUNDING = tl.constexpr(0.002)
NEAR = 2000
"""Tokens on each side of the guess that the band holds at least: likely tokens that were not in the sample move the cut
further than the sample tells, where few tokens have most of the weight. (Logits of SmolLM2-135M and Gemma-3-270m: with
this many the band held every cut of top_p 0.95 at temperature 0.6 and of 0.9 at 1.0, and 97 in 100 of 0.99 at 1.0.)"""
FAR = 3800
"""And at most, so that a program can hold the band in registers."""
_SURE = tl.constexpr(0.4)
"""In temperatures: a guess that is good to this can be refined."""


@triton.jit
def _over(pivots, values, measure, peaks, peak_measure, EACH: tl.constexpr):
    """[4]: what is measured above each of four pivots. EACH: the tokens that have a measure are counted instead, a
    sampled one for so many."""
    if EACH > 0:
        measure, peak_measure = tl.where(measure > 0, EACH, 0.0), tl.where(peak_measure > 0, 1.0, 0.0)
    sampled = tl.sum(tl.where(values[None, :] > pivots[:, None], measure[None, :], 0.0), axis=1)
    return sampled + tl.sum(tl.where(peaks[None, :] > pivots[:, None], peak_measure[None, :], 0.0), axis=1)


@triton.jit
def _pivots(low, high):
    return low + (high - low) * ((tl.arange(0, 4) + 1).to(tl.float32) * 0.25)


@triton.jit
def _below_kth_peak(peaks, top, count):
    """A logit that at least `count` of the peaks exceed, and few more; -inf where there are fewer."""
    real = peaks > float("-inf")
    low, high = tl.min(tl.where(real, peaks, float("inf"))), top
    for _ in range(_ROUNDS):
        pivots = _pivots(low, high)
        enough = tl.sum((peaks[None, :] >= pivots[:, None]).to(tl.int32), axis=1) >= count
        low = tl.max(tl.where(enough, pivots, low))
        high = tl.min(tl.where(enough, high, pivots))
    below = tl.where(low == 0, -1e-37, key_value(order_key(low) - 1))  # the key before that of 0 is -0.0
    return tl.where(tl.sum(real.to(tl.int32)) >= count, below, float("-inf"))


@triton.jit
def _guess(wanted, low, high, values, measure, peaks, peak_measure):
    """The logit above which `wanted` lies, as far as the sample knows."""
    for _ in range(_ROUNDS):
        pivots = _pivots(low, high)
        less = _over(pivots, values, measure, peaks, peak_measure, 0) < wanted
        low = tl.max(tl.where(less, low, pivots))
        high = tl.min(tl.where(less, pivots, high))
    return (low + high) * 0.5


@triton.jit
def _ends(least, most, fewest, near, far, low, high, values, measure, peaks, peak_measure, EACH: tl.constexpr,
          LOWER: tl.constexpr):  # fmt: skip
    """One end of the band. The lower one has above it the weight `most`, and `near` tokens, but not `far`; the upper
    one less than `least` and fewer than `fewest`, or fewer than `far`."""
    for _ in range(_ROUNDS):
        pivots = _pivots(low, high)
        weight = _over(pivots, values, measure, peaks, peak_measure, 0)
        count = _over(pivots, values, measure, peaks, peak_measure, EACH)
        if LOWER:
            above = ((weight < most) | (count < near)) & (count < far)
        else:
            above = ((weight < least) & (count < fewest)) | (count < far)
        low = tl.max(tl.where(above, low, pivots))
        high = tl.min(tl.where(above, pivots, high))
    return low, high


@triton.jit
def _sampled_band(
    logits, edited, stage, row, me, peaks, sub, top, count, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr, SOURCE: tl.constexpr,
    RANKED: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """The band about a share of the weight, or about a number of tokens too large to go by the peaks; of a flat row no
    band but the guess."""
    size: tl.constexpr = BLOCK // SUBS
    each: tl.constexpr = max(size // _SHARE, 1)
    scale: tl.constexpr = size / each
    temperature = row_temperature(me, RANKED)
    floor = row_floor(me, top, temperature, RANKED)
    place = tl.arange(0, BLOCKS_POW * SUBS * each)
    group = place // each
    token = group * size + (size - each) // 2 + place % each
    values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
    largest = tl.load(sub + row * BLOCKS * SUBS + group, mask=group < BLOCKS * SUBS, other=float("-inf"))
    real = (values < largest) & (values > float("-inf"))
    peak_measure = measured(peaks, top, temperature, floor, 0)
    measure = tl.where(real, measured(values, top, temperature, floor, 0) * scale, 0.0)
    total = tl.sum(measure) + tl.sum(peak_measure)
    bottom = top - 28.0 * temperature
    share = tl.minimum(top_p_of(me), 1.0).to(tl.float32)
    wanted = share * total
    guess = _guess(wanted, bottom, top, values, measure, peaks, peak_measure)
    astray = measure * (tl.where(values > guess, 1.0, 0.0) - share)
    error = _SIGMAS * tl.sqrt(tl.sum(astray * astray)) + _ROUNDING * total
    beside = _over(guess + temperature * 0.2 * (tl.arange(0, 4) - 1.5), values, measure, peaks, peak_measure, 0)
    per_temperature = (tl.max(beside) - tl.min(beside)) / 0.6
    many = error > FAR * tl.max(measured(tl.zeros([2], tl.float32) + guess, top, temperature, float("-inf"), 0))
    flat = (count <= 0) & many & (error < _SURE * per_temperature)
    low, high = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    if flat == 0:
        known = tl.max(_over(_pivots(guess, guess), values, measure, peaks, peak_measure, scale))
        least, most, near, far = wanted - error, wanted + error, known + NEAR, known + FAR
        fewest, too_few = known - NEAR, known - FAR
        if count > 0:
            asked = count.to(tl.float32)
            most, near, far = total * 0.0, asked + 4.0 * tl.sqrt(asked * scale) + NEAR, asked * 0.0 + float("inf")
        low, _high = _ends(least, most, fewest, near, far, bottom, top, values, measure, peaks, peak_measure,
                           scale, True)
        _low, high = _ends(least, most, fewest, near, too_few, bottom, top, values, measure, peaks, peak_measure,
                           scale, False)
        unbounded = (count > 0) | (fewest <= 0)
        high = tl.where(unbounded, float("inf"), high)
    return low, high, tl.where(flat, guess, float("inf"))


@triton.jit
def guess_band_kernel(
    logits, edited, stage, peak, sub, tops, cursor, bracket, guess, beside, stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr,
    SOURCE: tl.constexpr, RANKED: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """The band (low, high] of a row: tokens above are kept, those in it are collected. A row without a cut has none.
    Of a row whose guess is to be refined, that guess."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    tl.store(tops + row, top)
    tl.store(cursor + row, 0)
    tl.store(beside + row * BESIDE + tl.arange(0, BESIDE), tl.zeros([BESIDE], tl.float32))
    low, high = tl.full([], float("inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    about = tl.full([], float("inf"), tl.float32)
    if is_cut(me, RANKED) & is_finite(top):
        if RANKED:
            count = tl.load(me + _LOGPROBS)
        else:
            count = tl.load(me + _TOP_K)
        groups = tl.arange(0, BLOCKS_POW * SUBS)
        peaks = tl.load(sub + row * BLOCKS * SUBS + groups, mask=groups < BLOCKS * SUBS, other=float("-inf"))
        if RANKED:
            if count > 0:
                low, high = _below_kth_peak(peaks, top, count), tl.full([], float("inf"), tl.float32)
        elif (count > 0) & (count * 2 <= BLOCKS * SUBS):
            low, high = _below_kth_peak(peaks, top, count), tl.full([], float("inf"), tl.float32)
        else:
            low, high, about = _sampled_band(logits, edited, stage, row, me, peaks, sub, top, count, stride, VOCAB,
                                             MASK_WORDS, BLOCKS, BLOCKS_POW, BLOCK, SUBS, SOURCE, RANKED, NEAR, FAR)
    tl.store(bracket + row * 2, low)
    tl.store(bracket + row * 2 + 1, high)
    tl.store(guess + row, about)


@triton.jit
def _collect(values, token, inside, found, ids, cursor, row, CAPACITY: tl.constexpr):
    """Add some tokens of a block to the row's collection with one atomic. More than fit are counted only."""
    count = tl.sum(inside.to(tl.int32))
    if count > 0:
        first = tl.atomic_add(cursor + row, count)
        place = first + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        fits = inside & (place < CAPACITY)
        tl.store(found + row * CAPACITY + place, values, mask=fits)
        tl.store(ids + row * CAPACITY + place, token, mask=fits)


@triton.jit
def weigh_band_kernel(
    logits, edited, stage, tops, cursor, bracket, guess, beside, weight, upper, whole, found, ids, stride,
    VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
    FAR: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The weights of a block's tokens: of those above the band, of these and those in it, of all; no weights where a
    number of tokens is wanted. The ones in the band are collected. Block 0 writes down a band that was refined."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    temperature = load_float(me + _TEMPERATURE)
    top = tl.load(tops + row)
    if (tl.load(me + _OWNER) >= 0) & (temperature > 0) & is_finite(top):
        low, high = tl.load(bracket + row * 2), tl.load(bracket + row * 2 + 1)
        about = tl.load(guess + row)
        if about < float("inf"):
            low, high = refined_band(me, row, about, top, temperature, beside, FAR)
            if block == 0:
                tl.store(bracket + row * 2, low)
                tl.store(bracket + row * 2 + 1, high)
        floor = row_floor(me, top, temperature, False)
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        at = row * BLOCKS + block
        if tl.load(me + _TOP_K) > 0:
            tl.store(weight + at, tl.sum(tl.zeros([2], tl.int64)))  # nothing lies above a band that has no upper end
        else:
            weights = integer_weights(values, top, temperature, floor)
            tl.store(weight + at, tl.sum(tl.where(values > high, weights, 0)))
            if low < float("inf"):
                tl.store(upper + at, tl.sum(tl.where(values > low, weights, 0)))
                tl.store(whole + at, tl.sum(weights))
        if low < float("inf"):
            # What lies lower has no weight; of the rest the search leaves out what has none.
            least = tl.maximum(floor, top - 28.0 * temperature)
            inside = (values > low) & (values <= high) & (values >= least)
            _collect(values, token, inside, found, ids, cursor, row, CAPACITY)


@triton.jit
def rank_band_kernel(
    logits, stage, tops, cursor, bracket, whole, better, found, ids, out, stride, out_stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Of a block: the weight of all tokens, and how many are likelier than the drawn one; those that may be among the
    likeliest are collected."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    top = tl.load(tops + row)
    if is_cut(me, True) & is_finite(top):
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, logits, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        drawn = drawn_token(stage, out, me, out_stride)
        one = drawn + tl.zeros([1], tl.int32)
        mine = tl.max(read_logits(logits, logits, stage, row, one, stride, VOCAB, MASK_WORDS, SOURCE))
        likelier = (values > mine) | ((values == mine) & (token < drawn))
        at = row * BLOCKS + block
        tl.store(whole + at, tl.sum(integer_weights(values, top, 1.0, float("-inf"))))
        tl.store(better + at, tl.sum((likelier & (token < VOCAB)).to(tl.int32)))
        low = tl.load(bracket + row * 2)
        _collect(values, token, (token < VOCAB) & (values > low), found, ids, cursor, row, CAPACITY)
