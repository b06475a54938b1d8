"""GEMMs of rows and a weight of one byte each, fp8 or int8, whose sum ranks may share: deterministic mode.

Each slice is summed from zero, scaled (by the row, and by the weight's feature, its block of 128 columns, or the slice
itself) and added in the tree of `quire.kernels.slices`, as `linear_fixed` does with floats: a rank that has some slices
computes nodes of the tree, and every number of ranks gives the same bits.

All sizes of a tile follow from the slices of the whole sum, and products and sums are rounded one by one (no fused
multiply-add): whether a slice's sum is added to another or stored for another rank changes no bit of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.slices import Node, Slices
from quire.kernels.triton.linear_fixed import MAX_SLICES, add_parts, border, shared_parts
from quire.kernels.triton.slice_tree import count_slice, total_of

_ROWS, _FEATURES, _WARPS, _STAGES = 64, 64, 8, 3
"""Of every tile: a counter of 15 slices' sums, as many as there are, fits into the registers of eight warps."""
_MOST_COLUMNS = 128
_LEAST_COLUMNS = 32
"""Columns that tensor cores multiply at once, of numbers of one byte."""


def step_of(slices: Slices) -> int:
    """Columns that are multiplied before a scale: as many as divide all slices and blocks of 128, so that no step has
    two scales. It follows from the whole sum alone, whatever groups of it a rank has."""
    return math.gcd(slices.common, _MOST_COLUMNS)


@triton.jit(do_not_specialize=["num_rows"])
def _sliced_bytes_kernel(
    x, weight, x_scale, w_scale, bias, residual, out, num_rows, NUM_FEATURES: tl.constexpr,
    STRIDE: tl.constexpr,  # columns of x and of the weight
    WIDTH: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr, LONGEST: tl.constexpr, OWNED: tl.constexpr,
    FIRST: tl.constexpr, N: tl.constexpr, LAST_PLACE: tl.constexpr, PARTS: tl.constexpr,  # as in `linear_fixed`
    SCALES: tl.constexpr,  # of each feature, for GROUP columns each
    GROUP: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(num_rows, ROWS)
    tiles_n: tl.constexpr = (NUM_FEATURES + FEATURES - 1) // FEATURES
    pid = tl.program_id(0)
    band = pid // (BAND * tiles_n)
    band_rows = tl.minimum(tiles_m - band * BAND, BAND)
    inside_band = pid % (BAND * tiles_n)
    row = (band * BAND + inside_band % band_rows) * ROWS + tl.arange(0, ROWS)
    feature = (inside_band // band_rows) * FEATURES + tl.arange(0, FEATURES)
    used, real = row < num_rows, feature < NUM_FEATURES
    zero = tl.zeros([ROWS, FEATURES], tl.float32)
    c0, c1, c2, c3, c4, c5, c6, c7 = zero, zero, zero, zero, zero, zero, zero, zero
    x_row = x + row.to(tl.int64)[:, None] * STRIDE
    w_row = weight + feature.to(tl.int64)[:, None] * STRIDE
    row_scale = tl.load(x_scale + row, mask=used, other=0.0)
    KIND: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    blocks: tl.constexpr = (LONGEST + STEP - 1) // STEP
    before = border(OWNED, WIDTH, COUNT, UNIT)
    first = FIRST
    if PARTS > 1:
        first += tl.program_id(1) * N
        out += tl.program_id(1).to(tl.int64) * num_rows * NUM_FEATURES
    for turn in range(0, N):
        start = border(first + turn, WIDTH, COUNT, UNIT) - before
        end = border(first + turn + 1, WIDTH, COUNT, UNIT) - before
        value = tl.zeros([ROWS, FEATURES], tl.float32)
        for block in range(0, blocks):
            begin = start + block * STEP
            place = begin + tl.arange(0, COLUMNS)
            inside = place < tl.minimum(begin + STEP, end)
            values = tl.load(x_row + place[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_row + place[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            group = begin // GROUP if SCALES > 1 else 0
            scale = tl.load(w_scale + feature * SCALES + group, mask=real & (begin < end), other=0.0)
            value += tl.dot(values, tl.trans(w), out_dtype=KIND).to(tl.float32) * scale[None, :]
        value = value * row_scale[:, None]
        c0, c1, c2, c3, c4, c5, c6, c7 = count_slice(value, turn, LAST_PLACE, c0, c1, c2, c3, c4, c5, c6, c7)
    total = total_of(N, c0, c1, c2, c3, c4, c5, c6, c7)
    if BIAS:
        total += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
    target = row.to(tl.int64)[:, None] * NUM_FEATURES + feature[None, :]
    stores = used[:, None] & real[None, :]
    if RESIDUAL:
        total += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=stores)


@dataclass(frozen=True, slots=True)
class SlicedBytes:
    """A weight [features, columns of a run of slices] of bytes, as these GEMMs take it."""

    weight: Tensor
    scales: Tensor
    """float32 [features], or [features, columns / group]."""
    group: int | None
    """None: one scale a feature."""
    slices: Slices


def linear_sliced(
    x: Tensor, x_scales: Tensor, w: SlicedBytes, bias: Tensor | None, residual: Tensor | None, *, out: Tensor
) -> Tensor:
    """out = x W^T * scales + bias + residual of codes x [rows, width], of a weight that has all slices."""
    if not w.slices.whole:
        raise EngineError("this weight holds only some slices of the sum: use linear_sliced_nodes")
    _launch(x, x_scales, w, bias, residual, (0, w.slices.total), out)
    return out


def linear_sliced_nodes(x: Tensor, x_scales: Tensor, w: SlicedBytes, *, out: Tensor | None = None) -> Tensor:
    """float32 [nodes, rows, features], in `out` if given: the sum of each of `slices.nodes()`, without bias and
    residual. `x_scales` are those of whole rows, of which every rank has some columns."""
    nodes = w.slices.nodes()
    if out is None:
        out = torch.empty(len(nodes), x.shape[0], w.weight.shape[0], dtype=torch.float32, device=x.device)
    for node, part in zip(nodes, out, strict=True):
        _launch(x, x_scales, w, None, None, node, part)
    return out


def _launch(
    x: Tensor, x_scales: Tensor, w: SlicedBytes, bias: Tensor | None, residual: Tensor | None, node: Node, out: Tensor
) -> None:
    (rows, features), slices, step = out.shape, w.slices, step_of(w.slices)
    if slices.total > MAX_SLICES:
        raise EngineError(f"a sum of {slices.total} slices: deterministic mode on a GPU adds up to {MAX_SLICES}")
    if rows == 0:
        return
    count, tiles = node[1] - node[0], triton.cdiv(rows, _ROWS) * triton.cdiv(features, _FEATURES)
    parts = shared_parts(tiles, count)
    sums = out if parts == 1 else torch.empty(parts, rows, features, dtype=torch.float32, device=x.device)
    _sliced_bytes_kernel[(tiles, parts)](
        x, w.weight, x_scales, w.scales, out if bias is None else bias, out if residual is None else residual, sums,
        rows, features, slices.width, slices.sum_width, slices.total, slices.unit, slices.longest, slices.first,
        node[0], count // parts, (count // parts).bit_length() - 1, parts,
        1 if w.group is None else w.scales.shape[1], w.group or slices.width, _ROWS, _FEATURES, step,
        max(_LEAST_COLUMNS, step), bias is not None and parts == 1, residual is not None and parts == 1, 8,
        num_warps=_WARPS, num_stages=_STAGES, enable_fp_fusion=False,
    )  # fmt: skip
    if parts > 1:
        add_parts(sums, bias, residual, out)
