"""What the sampling kernels share: a row's settings and logits, integer weights, random numbers, keys that keep their
order."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row

HEAD = tl.constexpr(sampled_row.HEAD)
WORDS = tl.constexpr(sampled_row.WORDS)
_PLACE = tl.constexpr(sampled_row.PLACE)
_OWNER = tl.constexpr(sampled_row.OWNER)
_MASK = tl.constexpr(sampled_row.MASK)
_MASKS_AT = tl.constexpr(sampled_row.MASKS_AT)
_RING = tl.constexpr(sampled_row.RING)
_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
_LOG_MIN_P = tl.constexpr(sampled_row.LOG_MIN_P)
_TOP_K = tl.constexpr(sampled_row.TOP_K)
_TOP_P = tl.constexpr(sampled_row.TOP_P)
_LOGPROBS = tl.constexpr(sampled_row.LOGPROBS)

RAW = tl.constexpr(0)
"""Logits as the model gave them."""
MASKED = tl.constexpr(1)
"""Those, without what the row's grammar forbids."""
EDITED = tl.constexpr(2)
"""The copy with all changes made."""


@triton.jit
def integer_weights(values, peak, temperature, floor):
    """floor(exp((logit - peak) / temperature) * 2**40), nothing under the min_p floor."""
    weights = (tl.exp((values - peak) / temperature) * 1099511627776.0).to(tl.int64)
    return tl.where(values >= floor, weights, 0)


@triton.jit
def _philox(c0, c1, c3, k0, k1):
    """The first two words of Philox4x32-10 for counter (c0, c1, purpose 0, c3)."""
    c2 = c0 ^ c0
    a: tl.constexpr = 0xD2511F53
    b: tl.constexpr = 0xCD9E8D57
    for _ in tl.static_range(10):
        high_b, low_b = tl.umulhi(b, c2), tl.mul(b, c2, sanitize_overflow=False)
        high_a, low_a = tl.umulhi(a, c0), tl.mul(a, c0, sanitize_overflow=False)
        c0, c1 = high_b ^ c1 ^ k0, low_b
        c2, c3 = high_a ^ c3 ^ k1, low_a
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1


@triton.jit
def uniform(position, words, attempt):
    """The random number of a draw, in [0, 1) with 53 bits; `words`: seed (two) and sequence index."""
    high, low = _philox(
        position.to(tl.uint32),
        tl.load(words + 2).to(tl.uint32),
        (position * 0 + attempt).to(tl.uint32),
        tl.load(words).to(tl.uint32),
        tl.load(words + 1).to(tl.uint32),
    )
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def load_float(word):
    """A float32 out of int32 words."""
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def top_p_of(me):
    low = tl.load(me + _TOP_P).to(tl.int64) & 0xFFFFFFFF
    return ((tl.load(me + _TOP_P + 1).to(tl.int64) << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def min_p_floor(me, peak, temperature):
    """Logits under this have less than min_p of the likeliest token's probability."""
    return peak + temperature * load_float(me + _LOG_MIN_P)


@triton.jit
def draws(me, top):
    """Whether a row is drawn at random."""
    return (tl.load(me + _OWNER) >= 0) & (load_float(me + _TEMPERATURE) > 0) & is_finite(top)


@triton.jit
def draws_nucleus(me, top):
    """Whether a row is drawn at random under top_p alone."""
    return draws(me, top) & (tl.load(me + _TOP_K) == 0) & (top_p_of(me) < 2.0)


@triton.jit
def num_best(me, RANKED: tl.constexpr):
    """How many of a row's likeliest tokens are to be found: to draw from them, or (RANKED) to report them; 0: none."""
    if RANKED:
        count = tl.load(me + _LOGPROBS)
    else:
        count = tl.where(load_float(me + _TEMPERATURE) > 0, tl.load(me + _TOP_K), 0)
    return tl.where(tl.load(me + _OWNER) >= 0, tl.maximum(count, 0), 0)


@triton.jit
def reports(me, top):
    return (tl.load(me + _OWNER) >= 0) & (tl.load(me + _LOGPROBS) >= 0) & is_finite(top)


@triton.jit
def is_finite(value):
    return (value < float("inf")) & (value > float("-inf"))


@triton.jit
def row_peak(peak, row, BLOCKS: tl.constexpr, BLOCKS_POW: tl.constexpr):
    """The largest logit of a row, from those of its blocks."""
    blocks = tl.arange(0, BLOCKS_POW)
    return tl.max(tl.load(peak + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf")))


@triton.jit
def masked(values, stage, number, token, MASK_WORDS: tl.constexpr):
    """Without the tokens that mask `number` forbids; -1: all stay."""
    if number >= 0:
        words = stage + tl.load(stage + _MASKS_AT) + number.to(tl.int64) * MASK_WORDS
        word = tl.load(words + token // 32, mask=token < MASK_WORDS * 32, other=0)
        values = tl.where(((word >> (token % 32)) & 1) != 0, values, float("-inf"))
    return values


@triton.jit
def read_logits(logits, edited, stage, row, token, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
                SOURCE: tl.constexpr):  # fmt: skip
    """The logits of some tokens of a row, float32; -inf past the vocabulary."""
    inside = token < VOCAB
    me = stage + HEAD + row * WORDS
    if SOURCE == EDITED:
        values = tl.load(edited + row.to(tl.int64) * VOCAB + token, mask=inside, other=float("-inf"))
    else:
        start = logits + tl.load(me + _PLACE).to(tl.int64) * stride
        values = tl.load(start + token, mask=inside, other=float("-inf")).to(tl.float32)
        if SOURCE == MASKED:
            values = masked(values, stage, tl.load(me + _MASK), token, MASK_WORDS)
    return values


@triton.jit
def drawn_token(stage, out, me, out_stride):
    """The token that was drawn for a row."""
    return tl.load(out + tl.load(stage + _RING).to(tl.int64) * out_stride + tl.load(me + _PLACE) * 2)


@triton.jit
def order_key(values):
    """int32 in the order of the floats; both zeros have one key."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_value(key):
    """The float of an `order_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
