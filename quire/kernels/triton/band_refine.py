"""A finer guess of where a flat row's cut lies, for `band.py`: a quarter of its tokens, weighed above some pivots.

In a flat row the tokens near the cut weigh about the same and are many: the small sample of the first guess would leave
more of them in question than a program can hold. The weight above pivots about that guess, in a sample of a quarter of
the row, says where between two of them the cut is, and how dense tokens are there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import sampled_row
from quire.kernels.triton.cut import measured, row_floor, top_p_of
from quire.kernels.triton.sampling_parts import HEAD, WORDS, load_float, read_logits

_TEMPERATURE = tl.constexpr(sampled_row.TEMPERATURE)
SHARE = 4
"""One in so many tokens is in the sample."""
_SHARE = tl.constexpr(SHARE)
_PIECE = tl.constexpr(64)
"""Tokens of the sample that lie side by side: whole cache lines."""
_PIVOTS = tl.constexpr(14)
BESIDE_WORDS = 16
"""Sums of a row: above each pivot, then of all tokens, then of the squares by which a token moves the cut."""
BESIDE = tl.constexpr(BESIDE_WORDS)
_TOTAL = tl.constexpr(14)
_SQUARES = tl.constexpr(15)
_SIGMAS = tl.constexpr(4.5)
_LEAST = tl.constexpr(0.3)
"""Of FAR tokens on each side, the share that a band has at least."""
_WIDEST = tl.constexpr(0.5)
"""How far the outermost pivots are from the guess, in temperatures."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _offset(index):
    """Of a pivot from the guess, in temperatures: from -0.5 to 0.5, closer together in the middle."""
    at = index - 6.5
    return at * (0.034 + 0.001 * at * at)


@triton.jit
def refine_kernel(
    logits, edited, stage, tops, guess, beside, stride, VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr,
    BLOCK: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Sum what the sampled tokens of a part of a row weigh above each pivot, if its guess is to be refined."""
    part, row = tl.program_id(0), tl.program_id(1)
    about = tl.load(guess + row)
    if about < float("inf"):
        me = stage + HEAD + row * WORDS
        top, temperature = tl.load(tops + row), load_float(me + _TEMPERATURE)
        sampled = part * BLOCK + tl.arange(0, BLOCK)
        token = sampled // _PIECE * (_PIECE * _SHARE) + sampled % _PIECE
        values = read_logits(logits, edited, stage, row, token, stride, VOCAB, MASK_WORDS, SOURCE)
        measure = measured(values, top, temperature, row_floor(me, top, temperature, False), 0)
        place = tl.arange(0, BESIDE)
        astray = measure * (tl.where(values > about, 1.0, 0.0) - tl.minimum(top_p_of(me), 1.0).to(tl.float32))
        sums = tl.where(place == _TOTAL, tl.sum(measure), tl.where(place == _SQUARES, tl.sum(astray * astray), 0.0))
        for index in tl.static_range(_PIVOTS):
            pivot = about + temperature * _offset(index)
            sums = tl.where(place == index, tl.sum(tl.where(values > pivot, measure, 0.0)), sums)
        tl.atomic_add(beside + row * BESIDE + place, sums, mask=sums > 0)


@triton.jit
def refined_band(me, row, about, top, temperature, beside, FAR: tl.constexpr):
    """(low, high): as far on each side of where the cut lies between two pivots as the sample may be wrong, but no more
    than some FAR tokens."""
    place = tl.arange(0, BESIDE)
    sums = tl.load(beside + row * BESIDE + place)
    pivot = about + temperature * _offset(place.to(tl.float32))
    total = tl.sum(tl.where(place == _TOTAL, sums, 0.0))
    wanted = tl.minimum(top_p_of(me), 1.0).to(tl.float32) * total
    real = place < _PIVOTS
    less = sums < wanted
    upper = tl.min(tl.where(real & less, pivot, about + _WIDEST * temperature))
    lower = tl.max(tl.where(real & (less == 0), pivot, about - _WIDEST * temperature))
    over = tl.max(tl.where(real & less, sums, 0.0))
    under = tl.min(tl.where(real & (less == 0), sums, total))
    between = tl.maximum(under - over, 1e-30)
    cut = upper - (upper - lower) * tl.minimum((wanted - over) / between, 1.0)
    tokens = between * _SHARE / tl.maximum(tl.exp2((cut - top) * (_LOG2_E / temperature)), 1e-30)
    most = (upper - lower) * FAR / tl.maximum(tokens, 1.0)
    error = _SIGMAS * tl.sqrt(tl.sum(tl.where(place == _SQUARES, sums, 0.0))) * (upper - lower) / between
    half = tl.minimum(tl.minimum(tl.maximum(error, most * _LEAST), most), _WIDEST * temperature)
    return cut - half, cut + half
