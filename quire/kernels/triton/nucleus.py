"""top_p alone, without looking for its cut: the drawn token is kept if the likelier ones have less than that share.

If not, the cut lies among those, and one of them is drawn, and judged in turn. The first judgement is a pass over the
logits of all rows; rows that must draw again, 5 of 100 under top_p 0.95, do so in a program each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.pick import drawn, write_token
from quire.kernels.triton.sampling_parts import (
    HEAD,
    WORDS,
    drawn_token,
    draws_nucleus,
    integer_weights,
    load_float,
    min_p_floor,
    read_logits,
    row_peak,
    top_p_of,
)

_OWNER = tl.constexpr(sampled_row.OWNER)
_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)


@triton.jit
def _likelier_weights(
    logits, edited, stage, me, row, top, token, mine, drawn, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    SOURCE: tl.constexpr,
):  # fmt: skip
    """Of some tokens, the weights of those that are likelier than token `drawn` with the logit `mine`."""
    values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
    temperature = load_float(me + _TEMPERATURE)
    weights = integer_weights(values, top, temperature, min_p_floor(me, top, temperature))
    return tl.where((values > mine) | ((values == mine) & (token < drawn)), weights, 0)


@triton.jit
def _logit_of(
    logits, edited, stage, row, token, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, SOURCE: tl.constexpr
):
    one = token + tl.zeros([1], tl.int32)
    return tl.max(read_logits(logits, edited, stage, row, one, stride, VOCAB, MASK_WORDS, SOURCE))


@triton.jit
def likelier_kernel(
    logits, edited, stage, peak, likelier, out, stride, out_stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The weight of a block's tokens that are likelier than the one that was drawn."""
    block, row = tl.program_id(0), tl.program_id(1)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if draws_nucleus(me, top):
        chosen = drawn_token(stage, out, me, out_stride)
        mine = _logit_of(logits, edited, stage, row, chosen, stride, VOCAB, MASK_WORDS, SOURCE)
        at = row * BLOCKS + block
        if tl.load(peak + at) < mine:
            tl.store(likelier + at, tl.sum(tl.zeros([2], tl.int64)))
        else:
            token = block * BLOCK + tl.arange(0, BLOCK)
            weights = _likelier_weights(logits, edited, stage, me, row, top, token, mine, chosen, stride, VOCAB,
                                        MASK_WORDS, SOURCE)
            tl.store(likelier + at, tl.sum(weights))


@triton.jit
def redraw_kernel(
    logits, edited, stage, raw_peak, peak, weight, likelier, tokens, out, stride, tokens_stride, max_len, out_stride,
    VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Draw again for one row until its token is kept. EACH: blocks that are read at once."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    top = row_peak(peak, row, BLOCKS, BLOCKS_POW)
    if draws_nucleus(me, top):
        blocks = tl.arange(0, BLOCKS_POW)
        inside, at = blocks < BLOCKS, row * BLOCKS + blocks
        wanted = top_p_of(me) * tl.sum(tl.load(weight + at, mask=inside, other=0)).to(tl.float64)
        sums = tl.load(likelier + at, mask=inside, other=0)
        if tl.sum(sums).to(tl.float64) >= wanted:
            chosen = drawn_token(stage, out, me, out_stride)
            mine = _logit_of(logits, edited, stage, row, chosen, stride, VOCAB, MASK_WORDS, SOURCE)
            attempt = chosen * 0
            while tl.sum(sums).to(tl.float64) >= wanted:
                attempt += 1
                chosen = drawn(logits, edited, stage, me, row, top, sums, mine, chosen - 1, attempt, stride, VOCAB,
                               MASK_WORDS, BLOCKS, BLOCKS_POW, BLOCK, True, SOURCE)
                mine = _logit_of(logits, edited, stage, row, chosen, stride, VOCAB, MASK_WORDS, SOURCE)
                tl.debug_barrier()  # all have read the sums that are written over now
                for start in range(0, BLOCKS, EACH):
                    some = start + tl.arange(0, EACH)
                    token = some[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                    weights = _likelier_weights(logits, edited, stage, me, row, top, token, mine, chosen, stride, VOCAB,
                                                MASK_WORDS, SOURCE)
                    tl.store(likelier + row * BLOCKS + some, tl.sum(weights, axis=1), mask=some < BLOCKS)
                tl.debug_barrier()
                # Not from the first-level cache, which may hold the sums of the attempt before.
                sums = tl.load(likelier + at, mask=inside, other=0, cache_modifier=".cg")
            write_token(chosen, stage, me, row, tl.load(me + _OWNER), raw_peak, top, tokens, out, tokens_stride,
                        max_len, out_stride, VOCAB, BLOCKS, BLOCKS_POW)
