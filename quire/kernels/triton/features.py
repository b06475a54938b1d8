"""Hidden states that a draft head reads, in slots of the paged cache: kept by a step, fetched by the next (torch:
`step_reference`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _slot_of(table, row, position, table_stride, PAGE: tl.constexpr):
    block = tl.load(table + row.to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
    return block * PAGE + position % PAGE


@triton.jit
def _keep_kernel(
    features, kept, table, rows, positions, table_stride, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    row = tl.load(rows + token)
    if row >= 0:
        slot = _slot_of(table, row, tl.load(positions + token), table_stride, PAGE)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        value = tl.load(features + token.to(tl.int64) * WIDTH + column, mask=inside)
        tl.store(kept + slot * WIDTH + column, value, mask=inside)


@triton.jit
def _fetch_kernel(
    kept, table, rows, positions, out, table_stride, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    row, position = tl.load(rows + token), tl.load(positions + token)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = out + token.to(tl.int64) * WIDTH + column
    inside = column < WIDTH
    if (row >= 0) & (position > 0):
        slot = _slot_of(table, row, position - 1, table_stride, PAGE)
        tl.store(target, tl.load(kept + slot * WIDTH + column, mask=inside), mask=inside)
    else:
        tl.store(target, tl.zeros([BLOCK], out.dtype.element_ty), mask=inside)


def keep_features(features: Tensor, kept: Tensor, table: Tensor, block_size: int, rows: Tensor, positions: Tensor
                  ) -> None:
    """Hidden states [T, width] of tokens given by table row (negative: padding) and position, to their slots of `kept`
    [slots, width]."""
    count, width = features.shape
    if count:
        _keep_kernel[(count, triton.cdiv(width, _BLOCK))](
            features, kept, table, rows, positions, table.stride(0), width, block_size, _BLOCK, num_warps=4
        )


def fetch_features(kept: Tensor, table: Tensor, block_size: int, rows: Tensor, positions: Tensor, out: Tensor) -> None:
    """Into `out` [T, width]: what is kept of the token before each. Zeros for padding and before the first token."""
    count, width = out.shape
    if count:
        _fetch_kernel[(count, triton.cdiv(width, _BLOCK))](
            kept, table, rows, positions, out, table.stride(0), width, block_size, _BLOCK, num_warps=4
        )
