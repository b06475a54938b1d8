"""Matrix products of few rows, where reading the weight once at full memory bandwidth is all that matters.

Two shapes of kernel. Up to 4 rows: no tensor cores, one program per output feature (or two), the whole
width in flight
at once; norm before, activation, bias and residual after are fused, since at this size every launch costs
as much as
a small matrix. Up to 64 rows: tensor cores over narrow strips of output features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import KINDS, act_mul_reference, activate
from quire.kernels.triton.norm import rms_norm_reference

MAX_VECTOR_ROWS = 4
MAX_STRIP_ROWS = 64
_SHARED_MEMORY = 200 << 10
"""Of a multiprocessor, for the stages of the strip kernel (a Hopper chip has 227 KiB)."""


@dataclass(frozen=True, slots=True)
class VectorShape:
    """Output features per program, columns read at once, warps."""

    features: int = 1
    columns: int = 1024
    warps: int = 4


@dataclass(frozen=True, slots=True)
class StripShape:
    """Output features per program, columns read at once, warps and stages."""

    features: int = 16
    columns: int = 256
    warps: int = 4
    stages: int = 4


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
    if GATED:
        other = tl.zeros([ROWS, FEATURES, COLUMNS], tl.float32)
    start_row = weight + feature.to(tl.int64)[:, None] * WIDTH
    if PDL:
        # Weights depend on no kernel before: the first of them are asked for while that one still runs.
        first = real[:, None] & (column < WIDTH)[None, :]
        early = tl.load(start_row + column[None, :], mask=first, other=0.0, eviction_policy="evict_first")
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in tl.static_range(0, WIDTH, COLUMNS):
        place = start + column
        inside = place < WIDTH
        loads = real[:, None] & inside[None, :]
        if PDL and start == 0:
            w = early
        else:
            # Weights are read once: they should not push x, which every program reads, out of the first cache.
            w = tl.load(start_row + place[None, :], mask=loads, other=0.0, eviction_policy="evict_first")
        if GATED:
            second = start_row + num_features.to(tl.int64) * WIDTH
            w2 = tl.load(second + place[None, :], mask=loads, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + row[:, None] * WIDTH + place[None, :], mask=used[:, None] & inside[None, :], other=0.0).to(
            tl.float32
        )
        if NORM:
            square += values * values
            values = values * tl.load(gain + place, mask=inside, other=0.0)[None, :]
        acc += values[:, None, :] * w.to(tl.float32)[None, :, :]
        if GATED:
            other += values[:, None, :] * w2.to(tl.float32)[None, :, :]
    result = tl.sum(acc, axis=2)
    if NORM:
        scale = tl.rsqrt(tl.sum(square, axis=1) / WIDTH + eps)[:, None]
        result = result * scale
    stores = used[:, None] & real[None, :]
    if BIAS:
        result += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.sum(other, axis=2)
        if NORM:
            up = up * scale
        if BIAS:
            up += tl.load(bias + num_features + feature, mask=real, other=0.0).to(tl.float32)[None, :]
        result = activate(result, KIND) * up
    target = row[:, None].to(tl.int64) * num_features + feature[None, :]
    if RESIDUAL:
        result += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
    tl.store(out + target, result.to(out.dtype.element_ty), mask=stores)


@triton.jit(do_not_specialize=["num_rows"])
def _strip_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    num_rows,
    num_features,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    real = feature < num_features
    row = tl.arange(0, ROWS)
    used = row < num_rows
    acc = tl.zeros([ROWS, FEATURES], tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        inside = place < WIDTH
        w = tl.load(
            weight + feature.to(tl.int64)[:, None] * WIDTH + place[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        values = tl.load(x + row[:, None] * WIDTH + place[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(values, tl.trans(w), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
    target = row[:, None].to(tl.int64) * num_features + feature[None, :]
    stores = used[:, None] & real[None, :]
    if RESIDUAL:
        acc += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=stores)


# What wins where: H200, 2026-11-15, bf16, TB/s of weight read (docs/gpu-speed.md has the whole table).
#
#   features x width   rows 1: cuBLAS  vector       rows 2: cuBLAS vector strip   rows 16: cuBLAS strip
#     4096 x 1024               1.58   1.82 (f2)            1.58   1.26   1.80             1.58   1.79
#     1024 x 2048               0.33   1.19 (f1)            0.33   1.06   0.76 (f16)       0.71   0.76 (f16)
#     6144 x 1024               2.02   2.03 (f2)            2.06   1.43   2.11             2.07   2.13
#     1024 x 3072               0.85   1.50 (f1)            0.83   1.33   0.82 (f16)       0.81   0.82 (f16)
#   151936 x 1024               4.09   3.56 (f2)            3.97   1.85   4.12             3.81   3.86
#     6144 x 4096               2.97   2.83 (f2)            2.95   2.10   3.14             3.01   3.09
#     4096 x 4096               2.49   2.58 (f2)            2.45   2.00   2.77             2.43   2.75
#    24576 x 4096               3.92   3.46 (f2)            3.95   2.29   3.65             3.91   3.61
#     4096 x 12288              3.22   2.63 (f1, 2048)      3.21   1.34   3.20             3.39   3.15
#   151936 x 4096               4.33   3.97 (f2)            4.31   2.48   4.43             4.22   4.30
_FEW_FEATURES = 2048
_MANY_FEATURES = 65536
_WIDE_ROWS = 8192
_STRIP = StripShape(32, 128, 4, 5)
_THIN_STRIP = StripShape(16, 256, 4, 4)


def vector_shape(num_features: int, width: int, gated: bool, rows: int) -> VectorShape:
    """The fastest shape of the vector kernel (a gated one reads two rows of the weight for each feature)."""
    if rows > 1 or gated:
        columns = min(1024, triton.next_power_of_2(width))
        return VectorShape(1, columns, max(1, min(8, columns // 256)))
    if num_features <= _FEW_FEATURES:
        return VectorShape(1, min(1024, triton.next_power_of_2(width)), 4)
    if width >= _WIDE_ROWS:
        return VectorShape(1, 2048, 8)
    return VectorShape(2, min(1024, triton.next_power_of_2(width)), 4)


def vector_wins(rows: int, num_features: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a product with nothing before it is best left to the vector kernel."""
    if dtype == torch.float32:
        return rows <= MAX_VECTOR_ROWS
    if rows == 1:
        return width < _WIDE_ROWS and num_features < _MANY_FEATURES
    return rows <= MAX_VECTOR_ROWS and num_features <= _FEW_FEATURES and width <= 4096


def fusion_wins(rows: int, width: int) -> bool:
    """Whether a layer is fastest as four vector products with norm, gate and residual inside.

    Two rows of Qwen3-0.6B: 24 us of products a layer against 30; of Qwen3-8B the strip kernel and cuBLAS win.
    """
    return rows == 1 or (rows == 2 and width <= 2048)


def head_apart(num_features: int, dtype: torch.dtype) -> bool:
    """Whether so many features repay a norm of its own and the strip kernel (8B: 283 us against 314)."""
    return num_features >= _MANY_FEATURES and dtype != torch.float32


def strip_shape(rows: int, num_features: int, width: int, dtype: torch.dtype) -> StripShape | None:
    """The strip kernel's shape where it beats cuBLAS, else None."""
    if dtype == torch.float32 or rows > 32:
        return None
    if rows == 1:
        return _STRIP
    if rows > 16:
        # 4096 x 4096: 2.53 against 2.42; all others are cuBLAS's from here on.
        return _STRIP if _FEW_FEATURES < num_features <= 5120 and 4096 <= width <= 5120 else None
    if width >= _WIDE_ROWS or 8192 < num_features < _MANY_FEATURES:
        return None
    return _THIN_STRIP if num_features <= _FEW_FEATURES else _STRIP


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
    """[rows, features] of 1 to 4 rows: norm(x) W^T + bias, or act(first half) * second half of it, +
    residual."""
    rows, width = x.shape
    features = weight.shape[0] // (2 if gated else 1)
    sizes = sizes or vector_shape(features, width, gated is not None, rows)
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


def linear_strip(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    sizes: StripShape = StripShape(),  # noqa: B008 (frozen)
    out: Tensor | None = None,
) -> Tensor:
    """[rows, features] of up to 64 rows: x W^T + bias + residual."""
    rows, width = x.shape
    features = weight.shape[0]
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    ieee = x.dtype == torch.float32
    rows_pad = max(16, triton.next_power_of_2(rows))
    columns = min(sizes.columns, _pow2_floor(width))
    while sizes.stages * (rows_pad + sizes.features) * columns * x.element_size() > _SHARED_MEMORY:
        columns //= 2
    _strip_kernel[(triton.cdiv(features, sizes.features),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        rows,
        features,
        rows_pad,
        width,
        sizes.features,
        columns,
        bias is not None,
        residual is not None,
        "ieee" if ieee else "tf32",
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return out


def _pow2_floor(width: int) -> int:
    return max(16, 1 << (width.bit_length() - 1))


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
