"""The linear layer for one row (a GEMV), bound by reading the weight; norm, gate, bias and residual are fused.

A program takes a few output features and loads their rows of the weight in pieces of 16 bytes a thread, all of them in
flight before the first is used. Weight and activations have one layout, so no value goes through shared memory before
the final sum. In the general kernel, which has a third dimension for rows, every piece did, behind two barriers, and a
third of the bandwidth was lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import KINDS
from quire.kernels.triton.linear_parts import finish, load_early, load_weights


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
    other = acc
    if PDL:
        early = load_early(start_row, column, real, WIDTH)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        place = start + column
        inside = (place < WIDTH)[None, :]
        loads = real[:, None] & inside
        if PDL and start == 0:
            w = early
        else:
            w = load_weights(start_row, place, loads)
        if GATED:
            w2 = load_weights(start_row + NUM_FEATURES * WIDTH, place, loads)
        values = tl.load(x + place[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            square += values * values
            values = values * tl.load(gain + place[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += values * w.to(tl.float32)
        if GATED:
            other += values * w2.to(tl.float32)
    result = finish(
        acc, other, square, w_scale, bias, feature, real, NUM_FEATURES, eps, WIDTH, NORM, SCALED, BIAS, GATED, KIND
    )
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
    sizes: RowShape = RowShape(),
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
