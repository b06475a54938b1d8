"""The last steps of a row whose cut lies in a band (`band.py`): the exact cut, then the draw, in one program."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.cut import is_cut, row_floor, top_p_of
from quire.kernels.triton.cut_search import search
from quire.kernels.triton.pick import drawn, likeliest, write_token
from quire.kernels.triton.sampling_parts import HEAD, WORDS, is_finite, key_value, load_float

_OWNER = tl.constexpr(sampled_row.OWNER)
_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
_TOP_K = tl.constexpr(sampled_row.TOP_K)


@triton.jit
def _in_band(me, base, upper, whole, collected, to_the_end):
    """Whether the cut is among the tokens of the band. `to_the_end`: no token below it has weight."""
    most = tl.load(me + _TOP_K)
    wanted = top_p_of(me) * whole.to(tl.float64)
    by_count = (collected >= most) | to_the_end
    by_weight = (base.to(tl.float64) < wanted) & ((upper.to(tl.float64) >= wanted) | (upper == whole))
    return (collected > 0) & tl.where(most > 0, by_count, by_weight)


@triton.jit
def _cut_of_row(
    logits, edited, stage, me, row, top, temperature, cursor, bracket, weight, upper, whole, found, ids, stride,
    VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, HELD: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """(Logit of the last kept token, last id among those that share it); the blocks get the weights of the kept ones.
    Up to FEW, or up to HELD, are held in registers."""
    blocks = tl.arange(0, BLOCKS_POW)
    inside, at = blocks < BLOCKS, row * BLOCKS + blocks
    base = tl.sum(tl.load(weight + at, mask=inside, other=0))
    total = tl.sum(tl.load(whole + at, mask=inside, other=0))
    collected = tl.load(cursor + row)
    low, high = tl.load(bracket + row * 2), tl.load(bracket + row * 2 + 1)
    floor = row_floor(me, top, temperature, False)
    to_the_end = low < tl.maximum(floor, top - 28.0 * temperature)
    hit = _in_band(me, base, tl.sum(tl.load(upper + at, mask=inside, other=0)), total, collected, to_the_end)
    if hit == 0:
        # It lies elsewhere: every token of the row is in question.
        tl.store(weight + at, tl.zeros([BLOCKS_POW], tl.int64), mask=inside)
        tl.debug_barrier()
    base = tl.where(hit, base, 0)
    low, high = tl.where(hit, low, float("-inf")), tl.where(hit, high, float("inf"))
    fits = (hit & (collected <= CAPACITY)).to(tl.int32)
    count = tl.where(fits != 0, collected, VOCAB)
    settings = (count, fits, low, high, top, temperature, floor)
    source = (logits, edited, stage, found, ids, stride)
    if count <= FEW:
        key, last_id = search(me, row, total, base, settings, source, weight, BLOCK, VOCAB, MASK_WORDS, BLOCKS,
                              CAPACITY, FEW, SOURCE, True, True)
    elif count <= HELD:
        key, last_id = search(me, row, total, base, settings, source, weight, BLOCK, VOCAB, MASK_WORDS, BLOCKS,
                              CAPACITY, HELD, SOURCE, True, False)
    else:
        key, last_id = search(me, row, total, base, settings, source, weight, BLOCK, VOCAB, MASK_WORDS, BLOCKS,
                              CAPACITY, HELD // 2, SOURCE, False, False)
    # The weights are read again below: all atomics of this program come first.
    tl.debug_barrier()
    return key_value(key), last_id


@triton.jit
def finish_kernel(
    logits, edited, stage, raw_peak, peak, place, tops, cursor, bracket, weight, upper, whole, found, ids, tokens, out,
    stride, tokens_stride, max_len, out_stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, HELD: tl.constexpr,
    SOURCE: tl.constexpr,
):  # fmt: skip
    """Find the cut of one row, if it has one, and its token."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    owner = tl.load(me + _OWNER)
    if owner >= 0:
        top = tl.load(tops + row)
        temperature = load_float(me + _TEMPERATURE)
        blocks = tl.arange(0, BLOCKS_POW)
        inside = blocks < BLOCKS
        if (temperature > 0) & is_finite(top):
            limit, last = tl.full([], float("-inf"), tl.float32), owner * 0 + VOCAB
            if is_cut(me, False):
                limit, last = _cut_of_row(
                    logits, edited, stage, me, row, top, temperature, cursor, bracket, weight, upper, whole, found, ids,
                    stride, VOCAB, MASK_WORDS, BLOCKS, BLOCKS_POW, BLOCK, CAPACITY, FEW, HELD, SOURCE)
            # Not from the first-level cache, which knows nothing of the atomics.
            sums = tl.load(weight + row * BLOCKS + blocks, mask=inside, other=0, cache_modifier=".cg")
            chosen = drawn(logits, edited, stage, me, row, top, temperature, sums, limit, last, stride, VOCAB,
                           MASK_WORDS, BLOCKS, BLOCKS_POW, BLOCK, True, SOURCE)
        else:
            peaks = tl.load(peak + row * BLOCKS + blocks, mask=inside, other=float("-inf"))
            chosen = likeliest(peaks, top, place, row, VOCAB, BLOCKS, BLOCKS_POW)
        write_token(chosen, stage, me, row, owner, raw_peak, top, tokens, out, tokens_stride, max_len, out_stride,
                    VOCAB, BLOCKS, BLOCKS_POW)
