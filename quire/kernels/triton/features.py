"""Hidden states that a draft head reads, in slots of the paged cache: kept by a step, fetched by the next (torch:
`step_reference`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROJECTED = 3
"""Hidden states that `keep_projected` reads."""
MOST_PROJECTED_ROWS = 8
_MOST_WEIGHTS = 4 << 20
"""Of a projection that every row reads again, from the L2 cache."""
_BLOCK = 1024
_FEATURES = 4


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
def _keep_projected_kernel(
    first, second, third, weight, kept, table, rows, positions, table_stride, WIDTH: tl.constexpr, OUT: tl.constexpr,
    PAGE: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some features of one token. Weights are loaded while the kernel before still runs."""
    token = tl.program_id(0)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, BLOCK)
    real, inside = feature < OUT, column < WIDTH
    start = weight + feature[:, None] * (3 * WIDTH) + column[None, :]
    loads = real[:, None] & inside[None, :]
    first_weights = tl.load(start, mask=loads, other=0.0)
    second_weights = tl.load(start + WIDTH, mask=loads, other=0.0)
    third_weights = tl.load(start + 2 * WIDTH, mask=loads, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + token)
    if row >= 0:
        place = token.to(tl.int64) * WIDTH + column[None, :]
        acc = tl.load(first + place, mask=inside[None, :], other=0.0).to(tl.float32) * first_weights.to(tl.float32)
        acc += tl.load(second + place, mask=inside[None, :], other=0.0).to(tl.float32) * second_weights.to(tl.float32)
        acc += tl.load(third + place, mask=inside[None, :], other=0.0).to(tl.float32) * third_weights.to(tl.float32)
        slot = _slot_of(table, row, tl.load(positions + token), table_stride, PAGE)
        found = tl.sum(acc, axis=1).to(kept.dtype.element_ty)
        tl.store(kept + slot * OUT + feature, found, mask=real)


@triton.jit
def _sum_kernel(x, y, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    found = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


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


def projects(states: Sequence[Tensor], weight: Tensor) -> bool:
    """Whether `keep_projected` is for so many rows, and such a weight."""
    rows, width = states[0].shape
    return (len(states) == PROJECTED and rows <= MOST_PROJECTED_ROWS and weight.numel() <= _MOST_WEIGHTS
            and weight.dtype == states[0].dtype and weight.shape[1] == PROJECTED * width)


def keep_projected(
    states: Sequence[Tensor], weight: Tensor, kept: Tensor, table: Tensor, block_size: int, rows: Tensor,
    positions: Tensor, *, pdl: bool = False,
) -> None:  # fmt: skip
    """`keep_features` of three states side by side times a weight [features, 3 * width], in one launch."""
    count, width = states[0].shape
    features = weight.shape[0]
    if count:
        _keep_projected_kernel[(count, triton.cdiv(features, _FEATURES))](
            *states, weight, kept, table, rows, positions, table.stride(0), width, features, block_size, _FEATURES,
            triton.next_power_of_2(width), pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip


def add_rows(x: Tensor, y: Tensor, *, pdl: bool = False) -> Tensor:
    """x + y, into memory of its own."""
    out = torch.empty_like(x)
    if x.numel():
        _sum_kernel[(triton.cdiv(x.numel(), _BLOCK),)](
            x, y, out, x.numel(), _BLOCK, pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}))
    return out


def fetch_features(kept: Tensor, table: Tensor, block_size: int, rows: Tensor, positions: Tensor, out: Tensor) -> None:
    """Into `out` [T, width]: what is kept of the token before each. Zeros for padding and before the first token."""
    count, width = out.shape
    if count:
        _fetch_kernel[(count, triton.cdiv(width, _BLOCK))](
            kept, table, rows, positions, out, table.stride(0), width, block_size, _BLOCK, num_warps=4
        )
