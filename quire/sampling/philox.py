"""Philox4x32-10: random numbers that are a pure function of (seed, sequence, position, purpose, attempt).

The key is the 64-bit seed; the counter is (position, sequence index, purpose, attempt). Nothing is carried from
draw to draw, so a token's noise cannot depend on the batch, on preemption or on the device. The scalar form
is plain Python; `uniforms` does the same over int64 tensors of any device with the same bits (torch is
imported there only by whoever passes tensors in).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

_MULTIPLY_0: Final = 0xD2511F53
_MULTIPLY_1: Final = 0xCD9E8D57
_WEYL_0: Final = 0x9E3779B9
_WEYL_1: Final = 0xBB67AE85
_ROUNDS: Final = 10
_MASK: Final = 0xFFFFFFFF

Words = tuple[int, int, int, int]


class Purpose(enum.IntEnum):
    """What a draw is for; two purposes at one position never share noise."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds of the bijection over one counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLY_0 * c0, _MULTIPLY_1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, seq_index: int, position: int, purpose: int = Purpose.SAMPLE, attempt: int = 0) -> float:
    """One number in [0, 1) with 53 random bits; `seed` is taken modulo 2**64."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    high, low, _, _ = philox4x32((position & _MASK, seq_index & _MASK, int(purpose), attempt), key)
    return float(((high >> 5) << 26) | (low >> 6)) * 2.0**-53


def signed_seed(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit seed: what a seed tensor holds."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def philox4x32_tensors(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`philox4x32` over int64 tensors that hold 32-bit words.

    A 32x32 product wraps in int64 without losing bits: its upper half is read back by shift and mask.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniforms(seed: Tensor, seq_index: Tensor, position: Tensor, purpose: int | Tensor = Purpose.SAMPLE,
             attempt: int = 0) -> Tensor:
    """`uniform` for each entry of int64 tensors (seeds as `signed_seed`); float64 on their device."""
    counter = (position & _MASK, seq_index & _MASK, (position & 0) + purpose, (position & 0) + attempt)
    high, low, _, _ = philox4x32_tensors(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return (((high >> 5) << 26) | (low >> 6)).double() * 2.0**-53
