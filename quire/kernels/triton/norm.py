"""Row normalisations: RMS norm, RMS norm fused with the residual sum before it, layer norm.

Of up to 2,048 columns the squares of an RMS norm are added in one tree that depends on the columns' number alone,
neighbours first, so that a GEMM that takes the norm along (`quire.kernels.cuda.fixed_few`) can add them in the same
order. Squares of 16-bit numbers are exact in float32, so it does not matter which of them a compiler fuses with an
addition.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _neighbours_first(values, SIZE: tl.constexpr):
    """The sum of SIZE numbers, a power of two: each with its neighbour, then each of these sums with its neighbour."""
    left: tl.constexpr = SIZE // 2
    if left > 1:
        return _neighbours_first(tl.sum(tl.reshape(values, [left, 2]), axis=1), left)
    else:
        return tl.sum(values, axis=0)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row * HIDDEN + columns, mask=inside, other=0.0)
    if ADD:
        values = (
            values.to(tl.float32) + tl.load(residual + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        ).to(residual.dtype.element_ty)
        tl.store(residual + row * HIDDEN + columns, values, mask=inside)
    # The norm is of the stored sum, rounded, so that fused and separate give the same bits.
    values = values.to(tl.float32)
    if BLOCK <= 2048:
        total = _neighbours_first(values * values, BLOCK)
    else:
        total = tl.sum(values * values, axis=0)
    mean: tl.constexpr = 1.0 / HIDDEN
    scale = tl.rsqrt(tl.fma(total, mean, eps))
    tl.store(out + row * HIDDEN + columns, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_kernel(x, weight, bias, out, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    values = tl.load(x + row * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, axis=0) / HIDDEN, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / HIDDEN + eps)
    result = centred * scale * tl.load(weight + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(out + row * HIDDEN + columns, result.to(out.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    """One warp per 512 columns keeps 16 elements in a thread's registers."""
    return max(1, min(16, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dimension of a contiguous [rows, hidden]; the weight is float32."""
    return _rms_norm(x, None, weight, eps, pdl)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """residual += x, in place; returns the RMS norm of the sum."""
    return _rms_norm(x, residual, weight, eps, pdl)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pdl: bool) -> Tensor:
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    if x.shape[0]:
        launch = {"num_warps": _warps(block), **({"launch_pdl": True} if pdl else {})}
        added, inplace = residual is not None, x if residual is None else residual
        _rms_norm_kernel[(x.shape[0],)](x, inplace, weight, out, eps, x.shape[1], block, added, pdl, **launch)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    if x.shape[0]:
        _layer_norm_kernel[(x.shape[0],)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            eps,
            x.shape[1],
            block,
            bias is not None,
            num_warps=_warps(block),
        )
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.copy_((x.float() + residual.float()).to(x.dtype))
    return rms_norm_reference(residual, weight, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)
