"""What the sampling kernels share: integer weights, random numbers, a row's logits, keys that keep their order."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row

HEAD = tl.constexpr(sampled_row.HEAD)
WORDS = tl.constexpr(sampled_row.WORDS)
_PLACE = tl.constexpr(sampled_row.PLACE)
_MASK = tl.constexpr(sampled_row.MASK)
_MASKS_AT = tl.constexpr(sampled_row.MASKS_AT)

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
def _philox(c0, c1, k0, k1):
    """The first two words of Philox4x32-10 for counter (c0, c1, purpose 0, 0)."""
    c2 = c0 ^ c0
    c3 = c2
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
def uniform(position, words):
    """The random number of a draw, in [0, 1) with 53 bits; `words`: seed (two) and sequence index."""
    high, low = _philox(
        position.to(tl.uint32),
        tl.load(words + 2).to(tl.uint32),
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
def order_key(values):
    """int32 in the order of the floats; both zeros have one key."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_value(key):
    """The float of an `order_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
