"""Rows of activations in fp8 (e4m3) or int8 for GEMMs of such weights: one scale for each row, or one for all from
calibration.

The norm or the gate before such a GEMM writes them itself. Where ranks have some columns of a row each and must agree
on its scale, they exchange what `row_peaks` finds first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import KINDS, act_mul_reference, activate
from quire.kernels.triton.norm import add_rms_norm_reference, rms_norm_reference

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LARGEST_INT8 = 127.0
_LEAST = 1e-12
"""The largest number of a row counts as no less: a row of zeros has a scale too."""
_BLOCK = 2048
_OWN, _FIXED, _AGREED = (tl.constexpr(source) for source in range(3))
"""Where the scale of a row comes from: its own largest number, calibration (one for all rows), or the largest number of
a row of which this rank has some columns."""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows x[m, k] = codes[m, k] * scales[m]."""

    codes: Tensor
    scales: Tensor
    """float32 [rows]."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, some: slice) -> CodedRows:
        return CodedRows(self.codes[some], self.scales[some])


@triton.jit
def _scale_of(most, given, FIXED: tl.constexpr, KIND: tl.constexpr):
    """The scale of a row whose largest number is `most`, or the one that is given."""
    if FIXED:
        return tl.load(given)
    elif tl.int8 == KIND:
        return tl.maximum(most, 1e-12) / 127.0
    else:
        return tl.maximum(most, 1e-12) / 448.0


@triton.jit
def _code(values, scale, KIND: tl.constexpr):
    """e4m3 has no infinity: what is larger becomes the largest. Integers are the nearest ones, ties to even ones, which
    the sum with 1.5 * 2^23 leaves."""
    if tl.int8 == KIND:
        nearest = values / scale + 12582912.0
        return tl.minimum(tl.maximum(nearest - 12582912.0, -127.0), 127.0).to(tl.int8)
    else:
        return tl.minimum(tl.maximum(values / scale, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _quantize_kernel(
    x, given, codes, scales, WIDTH: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, SOURCE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row, or the gated activation of one; read twice, the second time out of the first cache. SOURCE: of its
    scale."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    start = x + row * (2 * WIDTH if GATED else WIDTH)
    if SOURCE == _OWN:
        most = _largest(start, WIDTH, GATED, KIND, BLOCK)
    elif SOURCE == _AGREED:
        most = tl.load(given + row)
    else:
        most = 0.0
    scale = _scale_of(most, given, SOURCE == _FIXED, codes.dtype.element_ty)
    for first in range(0, WIDTH, BLOCK):
        place = first + tl.arange(0, BLOCK)
        values = _values(start, first, WIDTH, GATED, KIND, BLOCK)
        tl.store(codes + row * WIDTH + place, _code(values, scale, codes.dtype.element_ty), mask=place < WIDTH)
    tl.store(scales + row, scale)


@triton.jit
def _peak_kernel(x, peaks, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number of a row, without its sign."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(peaks + row, _largest(x + row * WIDTH, WIDTH, False, 0, BLOCK))


@triton.jit
def _largest(start, WIDTH: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        most = tl.maximum(most, tl.abs(_values(start, first, WIDTH, GATED, KIND, BLOCK)))
    return tl.max(most, axis=0)


@triton.jit
def _values(start, first, WIDTH: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [BLOCK] of a row from column `first` on, rounded as they would be stored."""
    place = first + tl.arange(0, BLOCK)
    inside = place < WIDTH
    values = tl.load(start + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(start + WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        values = (activate(values, KIND) * up).to(start.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _norm_kernel(
    x, residual, weight, given, codes, scales, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As the kernel of `norm.add_rms_norm`; the normed row becomes codes."""
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
    values = values.to(tl.float32)
    norm = tl.rsqrt(tl.sum(values * values, axis=0) / HIDDEN + eps)
    normed = (values * norm * gain).to(x.dtype.element_ty).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(normed), axis=0), given, STATIC, codes.dtype.element_ty)
    tl.store(codes + row * HIDDEN + columns, _code(normed, scale, codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def _empty(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> CodedRows:
    codes = torch.empty(rows, width, dtype=dtype, device=device)
    return CodedRows(codes, torch.empty(rows, dtype=torch.float32, device=device))


def quantize_rows(
    x: Tensor, scale: Tensor | None = None, *, peaks: Tensor | None = None, gated: str | None = None,
    dtype: torch.dtype = FP8, pdl: bool = False,
) -> CodedRows:  # fmt: skip
    """Of contiguous x [rows, width], or of act(first half) * second half of it. `scale`: one for all (float32 [1]);
    `peaks`: what `row_peaks` found of whole rows, of which these are some columns; `dtype`: fp8 or int8."""
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    found = _empty(rows, width, x.device, dtype)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        source, given = (_FIXED, scale) if scale is not None else (_AGREED, peaks) if peaks is not None else (_OWN, x)
        _quantize_kernel[(rows,)](
            x, given, found.codes, found.scales, width, gated is not None, KINDS[gated or "silu"], source, block, pdl,
            num_warps=max(1, block // 256), **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return found


def row_peaks(x: Tensor, out: Tensor | None = None) -> Tensor:
    """float32 [rows], in `out` if given: the largest number of each row of contiguous x, without its sign."""
    rows, width = x.shape
    out = torch.empty(rows, dtype=torch.float32, device=x.device) if out is None else out
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _peak_kernel[(rows,)](x, out, width, block, num_warps=max(1, block // 256))
    return out


def norm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scale: Tensor | None = None, *,
    dtype: torch.dtype = FP8, pdl: bool = False,
) -> CodedRows:  # fmt: skip
    """The RMS norm of x, or of residual += x (in place), as codes."""
    rows, width = x.shape
    found = _empty(rows, width, x.device, dtype)
    block = triton.next_power_of_2(width)
    if rows:
        _norm_kernel[(rows,)](
            x, x if residual is None else residual, weight, found.scales if scale is None else scale, found.codes,
            found.scales, eps, width, block, residual is not None, scale is not None, pdl,
            num_warps=max(1, min(16, block // 512)), **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return found


def quantize_reference(
    x: Tensor, scale: Tensor | None = None, gated: str | None = None, dtype: torch.dtype = FP8
) -> CodedRows:
    wide = (x if gated is None else act_mul_reference(x, gated)).float()
    most = LARGEST_INT8 if dtype == torch.int8 else LARGEST
    scales = wide.abs().amax(1).clamp(min=_LEAST) / most if scale is None else scale.expand(x.shape[0]).contiguous()
    found = (wide / scales[:, None]).clamp(-most, most)
    return CodedRows((found.round() if dtype == torch.int8 else found).to(dtype), scales)


def norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scale: Tensor | None = None,
    dtype: torch.dtype = FP8,
) -> CodedRows:  # fmt: skip
    if residual is not None:
        return quantize_reference(add_rms_norm_reference(x, residual, weight, eps), scale, dtype=dtype)
    return quantize_reference(rms_norm_reference(x, weight, eps), scale, dtype=dtype)
