"""The likeliest tokens of a row, for top_k and for reports: a logit that they all exceed, then one pass that collects.

The largest logits of small groups of tokens say where the k-th of all lies at least: under the k-th largest of them. So
hardly more than k tokens are collected. Where more are wanted than half of the groups, a sample of each group says so
instead; it may be wrong, which the search among the collected (`best_search.py`) notices: it reads the row itself then.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.sampling_parts import (
    HEAD,
    WORDS,
    drawn_token,
    draws,
    integer_weights,
    is_finite,
    key_value,
    load_float,
    min_p_floor,
    num_best,
    order_key,
    read_logits,
    reports,
    row_peak,
)

_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
SUBS = 8
"""Groups of a block whose largest logit is kept."""
_ONE_IN = tl.constexpr(32)
"""One in so many tokens of a group is sampled."""
_ROUNDS = tl.constexpr(7)
"""Of a search with four pivots: good to a 16,000th of the range."""
SPARE = 500
"""Tokens that a sampled bound leaves above it beyond those that are wanted and four standard errors."""
NO_WEIGHT = tl.constexpr(28.0)
"""In temperatures: tokens so far below the likeliest have no weight."""


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
def _below_sampled(
    logits, edited, stage, row, me, peaks, sub, top, count, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr, SOURCE: tl.constexpr,
    SPARE: tl.constexpr,
):  # fmt: skip
    """A logit that at least `count` tokens exceed, as far as a sample knows; peaks stand for themselves."""
    size: tl.constexpr = BLOCK // SUBS
    each: tl.constexpr = max(size // _ONE_IN, 1)
    scale: tl.constexpr = size / each
    place = tl.arange(0, BLOCKS_POW * SUBS * each)
    group = place // each
    token = group * size + (size - each) // 2 + place % each
    values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
    largest = tl.load(sub + row * BLOCKS * SUBS + group, mask=group < BLOCKS * SUBS, other=float("-inf"))
    values = tl.where(values < largest, values, float("-inf"))
    asked = count.to(tl.float32)
    wanted = asked + 4.0 * tl.sqrt(asked * scale) + SPARE
    low, high = top - (NO_WEIGHT + 1.0) * load_float(me + _TEMPERATURE), top
    for _ in range(_ROUNDS):
        pivots = _pivots(low, high)
        number = scale * tl.sum((values[None, :] > pivots[:, None]).to(tl.float32), axis=1)
        number += tl.sum((peaks[None, :] > pivots[:, None]).to(tl.float32), axis=1)
        low = tl.max(tl.where(number >= wanted, pivots, low))
        high = tl.min(tl.where(number >= wanted, high, pivots))
    return low


@triton.jit
def bound_kernel(
    logits, edited, stage, peak, sub, cursor, bound, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr, SOURCE: tl.constexpr,
    RANKED: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """The logit above which a row's likeliest tokens lie; +inf where none are wanted. Nothing is collected yet."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    count = num_best(me, RANKED)
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    low = tl.full([], float("inf"), tl.float32)
    if (count > 0) & is_finite(top):
        groups = tl.arange(0, BLOCKS_POW * SUBS)
        peaks = tl.load(sub + row * BLOCKS * SUBS + groups, mask=groups < BLOCKS * SUBS, other=float("-inf"))
        low = _below_kth_peak(peaks, top, count)
        if RANKED == 0:  # noqa: SIM102
            if count * 2 > BLOCKS * SUBS:
                low = _below_sampled(logits, edited, stage, row, me, peaks, sub, top, count, stride, VOCAB, MASK_WORDS,
                                     BLOCKS, BLOCKS_POW, BLOCK, SUBS, SOURCE, SPARE)
    tl.store(cursor + row, 0)
    tl.store(bound + row, low)


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
def weigh_kernel(
    logits, edited, stage, peak, cursor, bound, weight, found, ids, stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr, BEST: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The weight of a block's tokens. BEST: of rows under top_k the likeliest are collected instead."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if draws(me, top):
        temperature = load_float(me + _TEMPERATURE)
        floor = min_p_floor(me, top, temperature)
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        if BEST:
            low = tl.load(bound + row)
            if low < float("inf"):
                # What lies lower has no weight; of the rest the search leaves out what has none.
                inside = (values > low) & (values >= tl.maximum(floor, top - NO_WEIGHT * temperature))
                _collect(values, token, inside, found, ids, cursor, row, CAPACITY)
                tl.store(weight + row * BLOCKS + block, tl.sum(tl.zeros([2], tl.int64)))
            else:
                tl.store(weight + row * BLOCKS + block, tl.sum(integer_weights(values, top, temperature, floor)))
        else:
            tl.store(weight + row * BLOCKS + block, tl.sum(integer_weights(values, top, temperature, floor)))


@triton.jit
def rank_kernel(
    logits, stage, peak, cursor, bound, whole, better, found, ids, out, stride, out_stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Of a block: the weight of all tokens, and how many are likelier than the drawn one; those that may be among the
    likeliest are collected."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if reports(me, top):
        token = block * BLOCK + tl.arange(0, BLOCK)
        values = read_logits(logits, logits, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        drawn = drawn_token(stage, out, me, out_stride)
        one = drawn + tl.zeros([1], tl.int32)
        mine = tl.max(read_logits(logits, logits, stage, row, one, stride, VOCAB, MASK_WORDS, SOURCE))
        likelier = (values > mine) | ((values == mine) & (token < drawn))
        at = row * BLOCKS + block
        tl.store(whole + at, tl.sum(integer_weights(values, top, 1.0, float("-inf"))))
        tl.store(better + at, tl.sum((likelier & (token < VOCAB)).to(tl.int32)))
        _collect(values, token, (token < VOCAB) & (values > tl.load(bound + row)), found, ids, cursor, row, CAPACITY)
