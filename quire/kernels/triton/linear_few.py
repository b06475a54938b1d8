"""GEMMs of few rows, where reading the weight once at full memory bandwidth is all that matters.

No tensor cores, one program per output feature, up to 4 rows; norm before, activation, bias and residual after are
fused, since at this size every launch costs as much as a small matrix. `linear_row` is for a single row,
`linear_prefetch` for more; `gemm_table` says which one runs where.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import KINDS, act_mul_reference
from quire.kernels.triton.linear_parts import finish, load_early, load_weights
from quire.kernels.triton.norm import rms_norm_reference

MAX_VECTOR_ROWS = 4


@dataclass(frozen=True, slots=True)
class VectorShape:
    """Output features per program, columns read at once, warps."""

    features: int = 1
    columns: int = 1024
    warps: int = 4


@triton.jit(do_not_specialize=["num_rows"])
def _vector_kernel(
    x,
    weight,
    bias,
    residual,
    gain,
    out,
    eps,
    num_rows,
    num_features,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """FEATURES outputs of all rows. The norm's scale is a factor of the whole sum, so one pass does both."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    real = feature < num_features
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    used = row < num_rows
    acc = tl.zeros([ROWS, FEATURES, COLUMNS], tl.float32)
    square = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = acc
    start_row = weight + feature.to(tl.int64)[:, None] * WIDTH
    if PDL:
        early = load_early(start_row, column, real, WIDTH)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        place = start + column
        inside = place < WIDTH
        loads = real[:, None] & inside[None, :]
        if PDL and start == 0:
            w = early
        else:
            w = load_weights(start_row, place, loads)
        if GATED:
            w2 = load_weights(start_row + num_features.to(tl.int64) * WIDTH, place, loads)
        values = tl.load(x + row[:, None] * WIDTH + place[None, :], mask=used[:, None] & inside[None, :], other=0.0).to(
            tl.float32
        )
        if NORM:
            square += values * values
            values = values * tl.load(gain + place, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc += values[:, None, :] * w.to(tl.float32)[None, :, :]
        if GATED:
            other += values[:, None, :] * w2.to(tl.float32)[None, :, :]
    result = finish(
        acc, other, square, bias, bias, feature, real, num_features, eps, WIDTH, NORM, False, BIAS, GATED, KIND
    )
    stores = used[:, None] & real[None, :]
    target = row[:, None].to(tl.int64) * num_features + feature[None, :]
    if RESIDUAL:
        result += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
    tl.store(out + target, result.to(out.dtype.element_ty), mask=stores)


def vector_shape(width: int) -> VectorShape:
    """Sizes that keep 8 elements of a row in a thread."""
    columns = min(1024, triton.next_power_of_2(width))
    return VectorShape(1, columns, max(1, min(8, columns // 256)))


def fusion_wins(rows: int, width: int) -> bool:
    """Whether a layer is fastest as four GEMMs with norm, gate and residual fused into them.

    Two rows of Qwen3-0.6B: 24 us of GEMMs a layer, unfused 30. For Qwen3-8B unfused GEMMs win
    over these (not over `kernels.cuda.few_gemm`).
    """
    return rows == 1 or (rows == 2 and width <= 2048)


def linear_vector(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
    out: Tensor | None = None,
    sizes: VectorShape | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features] of 1 to 4 rows: norm(x) W^T + bias, or act(first half) * second half of it, + residual."""
    rows, width = x.shape
    features = weight.shape[0] // (2 if gated else 1)
    sizes = sizes or vector_shape(width)
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    launch = {"num_warps": sizes.warps, **({"launch_pdl": True} if pdl else {})}
    _vector_kernel[(triton.cdiv(features, sizes.features),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        x if norm is None else norm,
        out,
        eps,
        rows,
        features,
        triton.next_power_of_2(rows),
        width,
        sizes.features,
        sizes.columns,
        bias is not None,
        residual is not None,
        norm is not None,
        gated is not None,
        KINDS[gated or "silu"],
        pdl,
        **launch,
    )
    return out


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
) -> Tensor:
    wide = x.double() if norm is None else rms_norm_reference(x.float(), norm, eps).double()
    result = wide @ weight.double().T
    if bias is not None:
        result = result + bias.double()
    if gated is not None:
        result = act_mul_reference(result.float(), gated).double()
    if residual is not None:
        result = result + residual.double()
    return result.to(x.dtype)
