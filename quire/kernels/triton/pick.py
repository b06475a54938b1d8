"""The token of a row, drawn from the weights of its blocks, and written where the host and the next step read it."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.best_search import find_cut
from quire.kernels.triton.sampling_parts import (
    HEAD,
    WORDS,
    integer_weights,
    is_finite,
    load_float,
    min_p_floor,
    num_best,
    read_logits,
    row_peak,
    uniform,
)

_OWNER = tl.constexpr(sampled_row.OWNER)
_PLACE = tl.constexpr(sampled_row.PLACE)
_POSITION = tl.constexpr(sampled_row.POSITION)
_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
_SEED_LOW = tl.constexpr(sampled_row.SEED_LOW)
_RING = tl.constexpr(sampled_row.RING)


@triton.jit
def drawn(
    logits, edited, stage, me, row, top, sums, limit, last, attempt, stride, VOCAB: tl.constexpr,
    MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr,
    SOURCE: tl.constexpr,
):  # fmt: skip
    """One token at random. `sums`: the weights of the blocks; CUT: down to the logit `limit`, of which the ids up to
    `last` are kept."""
    blocks = tl.arange(0, BLOCKS_POW)
    total = tl.sum(sums)
    noise = uniform(tl.load(me + _POSITION), me + _SEED_LOW, attempt)
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    block = tl.minimum(tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32)), BLOCKS - 1)
    target -= tl.sum(tl.where(blocks < block, sums, 0))
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
    temperature = load_float(me + _TEMPERATURE)
    weights = integer_weights(values, top, temperature, min_p_floor(me, top, temperature))
    if CUT:
        weights = tl.where((values > limit) | ((values == limit) & (token <= last)), weights, 0)
    return tl.minimum(block * BLOCK + tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32)), VOCAB - 1)


@triton.jit
def likeliest(peaks, top, place, row, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr):
    """The first of the largest, from the peaks of the blocks."""
    blocks = tl.arange(0, BLOCKS_POW)
    places = tl.load(place + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=VOCAB)
    return tl.min(tl.where(peaks == top, places, VOCAB))


@triton.jit
def write_token(
    chosen, stage, me, row, owner, raw_peak, top, tokens, out, tokens_stride, max_len, out_stride, VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr,
):  # fmt: skip
    position = tl.load(me + _POSITION)
    sound = is_finite(row_peak(raw_peak, row, BLOCKS, BLOCKS_POW))
    status = tl.where(sound & (top == float("-inf")), 2, tl.where(sound & is_finite(top), 0, 1))
    chosen = tl.where(status == 0, tl.minimum(chosen, VOCAB - 1), 0)
    slot = out + tl.load(stage + _RING).to(tl.int64) * out_stride + tl.load(me + _PLACE) * 2
    tl.store(slot, chosen)
    tl.store(slot + 1, status)
    tl.store(tokens + owner.to(tl.int64) * tokens_stride + position, chosen, mask=position < max_len)


@triton.jit
def pick_kernel(
    logits, edited, stage, raw_peak, peak, place, cursor, bound, weight, found, ids, tokens, out, stride,
    tokens_stride, max_len, out_stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCKS_POW: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
    BEST: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """The token of one row. BEST: some have top_k, and what it keeps is found first."""
    row = tl.program_id(0)
    me = stage + HEAD + row * WORDS
    owner = tl.load(me + _OWNER)
    if owner >= 0:
        blocks = tl.arange(0, BLOCKS_POW)
        inside = blocks < BLOCKS
        peaks = tl.load(peak + row * BLOCKS + blocks, mask=inside, other=float("-inf"))
        top = tl.max(peaks)
        if (load_float(me + _TEMPERATURE) > 0) & is_finite(top):
            limit, last = tl.full([], float("-inf"), tl.float32), owner * 0 + VOCAB
            if BEST:  # noqa: SIM102
                if num_best(me, False) > 0:
                    source = (logits, edited, stage, found, ids, stride)
                    limit, last = find_cut(me, row, top, cursor, bound, weight, source, BLOCK, VOCAB, MASK_WORDS,
                                           BLOCKS, CAPACITY, FEW, MANY, SOURCE)
                    # The weights are read again below: all atomics of this program come first.
                    tl.debug_barrier()
            # Not from the first-level cache, which knows nothing of the atomics.
            sums = tl.load(weight + row * BLOCKS + blocks, mask=inside, other=0, cache_modifier=".cg")
            chosen = drawn(logits, edited, stage, me, row, top, sums, limit, last, 0, stride, VOCAB, MASK_WORDS, BLOCKS,
                           BLOCKS_POW, BLOCK, BEST, SOURCE)
        else:
            chosen = likeliest(peaks, top, place, row, VOCAB, BLOCKS, BLOCKS_POW)
        write_token(chosen, stage, me, row, owner, raw_peak, top, tokens, out, tokens_stride, max_len, out_stride,
                    VOCAB, BLOCKS, BLOCKS_POW)
