"""GEMMs of rows and a weight of one byte each, fp8 or int8, in one kernel for any number of rows.

It runs in deterministic mode, for int8, for fp8 weights with a scale per block of 128 x 128, and where no faster kernel
fits.

One program sums all columns of its tile in one order, so that a row's bits do not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SCALE_BLOCK = 128
"""Columns that share a scale in block-scaled weights."""


@dataclass(frozen=True, slots=True)
class BytesShape:
    """Rows, features and columns of a tile, warps, stages."""

    rows: int = 64
    features: int = 128
    columns: int = 128
    warps: int = 4
    stages: int = 4


@triton.jit(do_not_specialize=["num_rows"])
def _bytes_kernel(
    x, weight, x_scale, w_scale, bias, residual, out, num_rows,
    NUM_FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """BLOCKS: the weight has a scale for each 128 columns of a feature, and COLUMNS are 128; rows have one each."""
    tiles_m = tl.cdiv(num_rows, ROWS)
    tiles_n: tl.constexpr = (NUM_FEATURES + FEATURES - 1) // FEATURES
    pid = tl.program_id(0)
    band = pid // (BAND * tiles_n)
    band_rows = tl.minimum(tiles_m - band * BAND, BAND)
    inside_band = pid % (BAND * tiles_n)
    row = (band * BAND + inside_band % band_rows) * ROWS + tl.arange(0, ROWS)
    feature = (inside_band // band_rows) * FEATURES + tl.arange(0, FEATURES)
    used, real = row < num_rows, feature < NUM_FEATURES
    x_row = x + row.to(tl.int64)[:, None] * WIDTH
    w_row = weight + feature.to(tl.int64)[:, None] * WIDTH
    INT8: tl.constexpr = x.dtype.element_ty == tl.int8
    acc = tl.zeros([ROWS, FEATURES], tl.int32 if INT8 else tl.float32)
    for block in range(0, (WIDTH + COLUMNS - 1) // COLUMNS):
        place = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = place < WIDTH
        values = tl.load(x_row + place[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_row + place[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if BLOCKS:
            blocks: tl.constexpr = (WIDTH + 127) // 128
            scale = tl.load(w_scale + feature * blocks + block, mask=real, other=0.0)
            acc += tl.dot(values, tl.trans(w)) * scale[None, :]
        else:
            acc = tl.dot(values, tl.trans(w), acc, out_dtype=tl.int32 if INT8 else tl.float32)
    acc = acc.to(tl.float32) * tl.load(x_scale + row, mask=used, other=0.0)[:, None]
    if not BLOCKS:
        acc = acc * tl.load(w_scale + feature, mask=real, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
    target = row.to(tl.int64)[:, None] * NUM_FEATURES + feature[None, :]
    stores = used[:, None] & real[None, :]
    if RESIDUAL:
        acc += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=stores)


def linear_bytes(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None = None,
    residual: Tensor | None = None, *, out: Tensor, sizes: BytesShape = BytesShape(),
) -> Tensor:  # fmt: skip
    """out = x W^T * scales + bias + residual of codes x [rows, width] and weight [features, width]; `scales` are those
    of the weight (float32 [features], or [features, width / 128]) and of the rows (float32 [rows])."""
    rows, (features, width) = x.shape[0], weight.shape
    if rows == 0:
        return out
    tiles = triton.cdiv(rows, sizes.rows) * triton.cdiv(features, sizes.features)
    _bytes_kernel[(tiles,)](
        x, weight, scales[1], scales[0], out if bias is None else bias, out if residual is None else residual, out,
        rows, features, width, sizes.rows, sizes.features, sizes.columns, scales[0].dim() == 2, bias is not None,
        residual is not None, 8, num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return out


def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    """float32 [features, width] of codes and their scales, of features or of blocks."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    return weight.float() * scales.repeat_interleave(SCALE_BLOCK, 1)[:, : weight.shape[1]]


def linear_reference(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None, residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    found = (x.double() * scales[1][:, None].double()) @ dequantized(weight, scales[0]).double().T
    for more in (bias, residual):
        found = found if more is None else found + more.double()
    return found.to(dtype)
