"""What the kernels of `linear_row` and `linear_few` share: early loads of weights; norm, bias and gate of the sums."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.activation import activate


@triton.jit
def load_weights(start_row, place, loads):
    """Weights are read once: they should not push x, which every program reads, out of the L1 cache."""
    return tl.load(start_row + place[None, :], mask=loads, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_early(start_row, column, real, WIDTH: tl.constexpr):
    """The first weights, which no earlier kernel writes: loaded while the previous kernel still runs. Then waits for
    it."""
    early = load_weights(start_row, column, real[:, None] & (column < WIDTH)[None, :])
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    return early


@triton.jit
def finish(
    acc, other, square, w_scale, bias, feature, real, num_features, eps, WIDTH: tl.constexpr, NORM: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The outputs [features] or [rows, features] of `acc` [..., features, columns]: summed over columns, times the
    norm's scale and the scales of an fp8 weight's features, with the bias and the gate. `other`: as `acc`, of the
    second half of the weight; `square` [rows, columns]."""
    AXIS: tl.constexpr = len(acc.shape) - 1
    result = tl.sum(acc, axis=AXIS)
    if NORM:
        if AXIS == 1:
            scale = tl.rsqrt(tl.sum(tl.sum(square, axis=1), axis=0) / WIDTH + eps)
        else:
            scale = tl.rsqrt(tl.sum(square, axis=1) / WIDTH + eps)[:, None]
        result = result * scale
    if SCALED:
        result = result * _by_feature(w_scale + feature, real, AXIS)
    if BIAS:
        result += _by_feature(bias + feature, real, AXIS)
    if GATED:
        up = tl.sum(other, axis=AXIS)
        if NORM:
            up = up * scale
        if SCALED:
            up = up * _by_feature(w_scale + num_features + feature, real, AXIS)
        if BIAS:
            up += _by_feature(bias + num_features + feature, real, AXIS)
        result = activate(result, KIND) * up
    return result


@triton.jit
def _by_feature(values, real, AXIS: tl.constexpr):
    """One value for each feature, in the shape of the outputs."""
    value = tl.load(values, mask=real, other=0.0).to(tl.float32)
    if AXIS == 1:
        return value
    else:
        return value[None, :]
