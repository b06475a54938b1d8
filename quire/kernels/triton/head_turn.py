"""Norm and rotation of heads inside another kernel, in Gluon, with the bits of `rope_cache`.

Each addition and each fused multiply-add is written out, so they do not depend on where the numbers lie.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _neighbours_first(values, ROWS: gl.constexpr, SIZE: gl.constexpr):
    """[ROWS, 1]: the sum of each row of SIZE numbers, each with its neighbour, then each of these sums with its
    neighbour."""
    LEFT: gl.constexpr = SIZE // 2
    pairs = gl.sum(values.reshape([ROWS, LEFT, 2]), axis=2)
    if LEFT > 1:
        return _neighbours_first(pairs, ROWS, LEFT)
    else:
        return pairs


@gluon.jit
def turned_heads(
    low, high, gains, angles, eps, ROWS: gl.constexpr, HALF: gl.constexpr, NORM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Both halves [ROWS, HALF] of heads in LAYOUT, normed and rotated, in float32. `gains`, `angles`: [1, HALF] for
    each half; cosines and sines."""
    low = low.to(gl.float32)
    high = high.to(gl.float32)
    if NORM:
        square = _neighbours_first(low * low, ROWS, HALF) + _neighbours_first(high * high, ROWS, HALF)
        factor = gl.rsqrt(gl.fma(square, 0.5 / HALF, eps))
        factor = gl.convert_layout(factor, LAYOUT, assert_trivial=True)
        low = low * factor * gains[0]
        high = high * factor * gains[1]
    cos, sin = angles
    return gl.fma(low, cos, -(high * sin)), gl.fma(high, cos, low * sin)
