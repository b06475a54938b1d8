"""Log-probabilities of drawn tokens and of the likeliest ones, without sorting the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.best_search import chunk_of
from quire.kernels.triton.sampling_parts import HEAD, WORDS, drawn_token, order_key, read_logits, reports, row_peak

_PLACE = tl.constexpr(sampled_row.PLACE)
_LOGPROBS = tl.constexpr(sampled_row.LOGPROBS)
_RING = tl.constexpr(sampled_row.RING)
_TOP = tl.constexpr(sampled_row.TOP)
_REPORT_WORDS = tl.constexpr(sampled_row.REPORT_WORDS)


@triton.jit
def _next_best(
    key, token, row, settings, source, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """(Key, id) of the likeliest token in question after the one given; of equals the lower id comes first."""
    best = tl.max(tl.full([2], -9223372036854775807, tl.int64))
    for start in range(0, settings[0], CHUNK):
        values, ids, real = chunk_of(start, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
        mine = order_key(values)
        later = real & ((mine < key) | ((mine == key) & (ids > token)))
        # One number that is larger for a larger key, and for a lower id.
        both = mine.to(tl.int64) * 2147483648 + (2147483647 - ids)
        best = tl.maximum(best, tl.max(tl.where(later, both, -9223372036854775807)))
    return (best >> 31).to(tl.int32), (2147483647 - (best & 2147483647)).to(tl.int32)


@triton.jit
def _logprob(values, top, log_total):
    return ((values - top).to(tl.float64) - log_total).to(tl.float32)


@triton.jit
def report_kernel(
    logits, stage, peak, whole, better, cursor, bound, found, ids, out, report, stride, out_stride, report_stride,
    VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """What is reported of a row: see `sampled_row.REPORT_WORDS`."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if reports(me, top):
        drawn = drawn_token(stage, out, me, out_stride)
        mine = report + tl.load(stage + _RING).to(tl.int64) * report_stride + tl.load(me + _PLACE) * _REPORT_WORDS
        blocks = tl.arange(0, BLOCKS_POW)
        weight = tl.sum(tl.load(whole + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0))
        rank = tl.sum(tl.load(better + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0)) + 1
        collected = tl.load(cursor + row)
        log_total = tl.log(weight.to(tl.float64) * (1.0 / 1099511627776.0))
        one = drawn + tl.zeros([1], tl.int32)
        value = tl.max(read_logits(logits, logits, stage, row, one, stride, VOCAB, MASK_WORDS, SOURCE))
        tl.store(mine, drawn)
        tl.store(mine + 1, _logprob(value, top, log_total).to(tl.int32, bitcast=True))
        tl.store(mine + 2, rank)
        fits = (collected <= CAPACITY).to(tl.int32)
        settings = (tl.where(fits != 0, collected, VOCAB), fits, tl.load(bound + row), top, 1.0, float("-inf"))
        source = (logits, logits, stage, found, ids, stride)
        key, token = order_key(top) + 1, drawn * 0 - 1
        wanted = tl.minimum(tl.load(me + _LOGPROBS), VOCAB)
        for place in range(tl.minimum(wanted, collected), wanted):
            # Fewer tokens than that are possible.
            tl.store(mine + 3 + place, drawn)
            tl.store(mine + 3 + _TOP + place, tl.full([], float("-inf"), tl.float32).to(tl.int32, bitcast=True))
        for place in range(0, tl.minimum(wanted, collected)):
            key, token = _next_best(
                key, token, row, settings, source, VOCAB, MASK_WORDS, CAPACITY, CHUNK, SOURCE)
            one = token + tl.zeros([1], tl.int32)
            value = tl.max(read_logits(logits, logits, stage, row, one, stride, VOCAB, MASK_WORDS, SOURCE))
            tl.store(mine + 3 + place, token)
            tl.store(mine + 3 + _TOP + place, _logprob(value, top, log_total).to(tl.int32, bitcast=True))
