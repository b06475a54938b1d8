"""The request table on the device: apply a step's diffs, gather a step's inputs (torch: `step_reference`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(arena, places, values, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(
        arena + tl.load(places + index, mask=inside, other=0),
        tl.load(values + index, mask=inside),
        mask=inside,
    )


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(
    tokens,
    table,
    rows,
    positions,
    ids,
    wide_positions,
    slots,
    lengths,
    count,
    tokens_stride,
    table_stride,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows + index, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions + index, mask=inside, other=0)
    real = row >= 0
    block = tl.load(table + row * table_stride + position // PAGE, mask=real, other=0).to(tl.int64)
    tl.store(slots + index, tl.where(real, block * PAGE + position % PAGE, -1), mask=inside)
    if FIRST:
        token = tl.load(tokens + row * tokens_stride + position, mask=real, other=0)
        tl.store(ids + index, token.to(tl.int64), mask=inside)
        tl.store(wide_positions + index, position.to(tl.int64), mask=inside)
    if LENGTHS:
        tl.store(lengths + index, tl.where(real, position + 1, 0), mask=inside)


def scatter(arena: Tensor, places: Tensor, values: Tensor) -> None:
    """arena[places[i]] = values[i], all int32; no place twice."""
    count = places.shape[0]
    if count:
        _scatter_kernel[(triton.cdiv(count, _BLOCK),)](arena, places, values, count, _BLOCK, num_warps=4)


def gather_inputs(
    tokens: Tensor,
    tables: tuple[Tensor, ...],
    block_size: int,
    rows: Tensor,
    positions: Tensor,
    ids: Tensor,
    wide_positions: Tensor,
    slots: tuple[Tensor, ...],
    lengths: Tensor | None,
) -> None:
    """Token ids, positions and cache slots of tokens given by table row and position.

    A negative row is padding: id 0, slot -1. `lengths`, if asked for, gets position + 1 (0 for padding).
    """
    count = rows.shape[0]
    for group, (table, slot) in enumerate(zip(tables, slots, strict=True)):
        _gather_kernel[(triton.cdiv(count, _BLOCK),)](
            tokens,
            table,
            rows,
            positions,
            ids,
            wide_positions,
            slot,
            slot if lengths is None else lengths,
            count,
            tokens.stride(0),
            table.stride(0),
            block_size,
            group == 0,
            lengths is not None and group == 0,
            _BLOCK,
            num_warps=4,
        )
