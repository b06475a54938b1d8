"""The matrix product of one row, which is nothing but reading the weight: norm, gate, bias and residual ride along.

A program takes a few output features and reads their rows of the weight in pieces of which every thread holds
16 bytes, all of them asked for before the first is used. Weight and activations have one layout, so that no
value crosses shared memory before the final sum: with the general kernel's third dimension (rows) every piece
did, behind two barriers, and a third of the bandwidth was lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import KINDS, activate


@dataclass(frozen=True, slots=True)
class RowShape:
    """Output features per program, columns read at once, warps. 256 columns a warp are 16 bytes a thread."""

    features: int = 1
    columns: int = 1024
    warps: int = 4


@triton.jit
def _row_kernel(
    x,
    weight,
    w_scale,
    bias,
    residual,
    gain,
    out,
    eps,
    NUM_FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """FEATURES outputs. The norm's scale is a factor of the whole sum, so one pass does both."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, COLUMNS)
    real = feature < NUM_FEATURES
    start_row = weight + feature.to(tl.int64)[:, None] * WIDTH
    acc = tl.zeros([FEATURES, COLUMNS], tl.float32)
    square = tl.zeros([1, COLUMNS], tl.float32)
    if GATED:
        other = tl.zeros([FEATURES, COLUMNS], tl.float32)
    if PDL:
        # Weights depend on no kernel before: the first of them are asked for while that one still runs.
        first = real[:, None] & (column < WIDTH)[None, :]
        early = tl.load(start_row + column[None, :], mask=first, other=0.0, eviction_policy="evict_first")
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in tl.static_range(0, WIDTH, COLUMNS):
        place = start + column
        inside = (place < WIDTH)[None, :]
        loads = real[:, None] & inside
        if PDL and start == 0:
            w = early
        else:
            # Weights are read once: they should not push x, which every program reads, out of the first cache.
            w = tl.load(start_row + place[None, :], mask=loads, other=0.0, eviction_policy="evict_first")
        if GATED:
            second = start_row + NUM_FEATURES * WIDTH
            w2 = tl.load(second + place[None, :], mask=loads, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + place[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            square += values * values
            values = values * tl.load(gain + place[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += values * w.to(tl.float32)
        if GATED:
            other += values * w2.to(tl.float32)
    result = tl.sum(acc, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(square, axis=1), axis=0) / WIDTH + eps)
        result = result * scale
    if SCALED:
        result = result * tl.load(w_scale + feature, mask=real, other=0.0)
    if BIAS:
        result += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(other, axis=1)
        if NORM:
            up = up * scale
        if SCALED:
            up = up * tl.load(w_scale + NUM_FEATURES + feature, mask=real, other=0.0)
        if BIAS:
            up += tl.load(bias + NUM_FEATURES + feature, mask=real, other=0.0).to(tl.float32)
        result = activate(result, KIND) * up
    if RESIDUAL:
        result += tl.load(residual + feature, mask=real, other=0.0).to(tl.float32)
    tl.store(out + feature, result.to(out.dtype.element_ty), mask=real)


def linear_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
    out: Tensor | None = None,
    sizes: RowShape = RowShape(),  # noqa: B008 (frozen)
    pdl: bool = False,
) -> Tensor:
    """[1, features]: norm(x) W^T + bias, or act(first half) * second half of it, + residual. `scales`: those of the
    features of an fp8 weight (float32), whose row stays in its own type.

    Its reference is `linear_few.linear_reference`.
    """
    width = x.shape[1]
    features = weight.shape[0] // (2 if gated else 1)
    if out is None:
        out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    columns = min(sizes.columns, triton.next_power_of_2(width))
    launch = {"num_warps": sizes.warps, **({"launch_pdl": True} if pdl else {})}
    _row_kernel[(triton.cdiv(features, sizes.features),)](
        x,
        weight,
        x if scales is None else scales,
        x if bias is None else bias,
        x if residual is None else residual,
        x if norm is None else norm,
        out,
        eps,
        features,
        width,
        sizes.features,
        columns,
        scales is not None,
        bias is not None,
        residual is not None,
        norm is not None,
        gated is not None,
        KINDS[gated or "silu"],
        pdl,
        **launch,
    )
    return out
