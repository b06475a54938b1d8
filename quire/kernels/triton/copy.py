"""Copies inside the paged cache: whole blocks (copy on write), and single slots (an accepted branch moved
together)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.types import LayerCache

_BLOCK = 1024


@triton.jit
def _copy_blocks_kernel(first, second, source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr, TWO: tl.constexpr):
    pair = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    from_block = tl.load(source + pair).to(tl.int64) * SIZE
    to_block = tl.load(target + pair).to(tl.int64) * SIZE
    inside = place < SIZE
    tl.store(first + to_block + place, tl.load(first + from_block + place, mask=inside), mask=inside)
    if TWO:
        tl.store(second + to_block + place, tl.load(second + from_block + place, mask=inside), mask=inside)


@triton.jit
def _copy_slots_kernel(
    k, v, source, target, NUM_KV: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    pair, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, BLOCK_DIM)
    from_slot, to_slot = tl.load(source + pair), tl.load(target + pair)
    from_place = ((from_slot // PAGE * NUM_KV + head) * PAGE + from_slot % PAGE) * DIM + dim
    to_place = ((to_slot // PAGE * NUM_KV + head) * PAGE + to_slot % PAGE) * DIM + dim
    tl.store(k + to_place, tl.load(k + from_place, mask=dim < DIM), mask=dim < DIM)
    tl.store(v + to_place, tl.load(v + from_place, mask=dim < DIM), mask=dim < DIM)


def copy_blocks(cache: LayerCache, source: Tensor, target: Tensor) -> None:
    """Block source[i] -> target[i] (int32), all at once: no block may be both a source and a target."""
    parts = [_bytes(part) for part in cache.tensors.values()]
    while parts:
        first = parts.pop(0)
        size = first[0].numel()
        # Two parts with blocks of one size and type, as k and v are, in one launch.
        two = bool(parts) and (parts[0][0].numel(), parts[0].dtype) == (size, first.dtype)
        second = parts.pop(0) if two else first
        _copy_blocks_kernel[(source.shape[0], triton.cdiv(size, _BLOCK))](
            first, second, source, target, size, _BLOCK, two, num_warps=4
        )


def copy_slots(cache: LayerCache, source: Tensor, target: Tensor) -> None:
    """Slot source[i] -> target[i] (int64) of every head, all at once: sources and targets may not overlap."""
    _, heads, page, dim = cache.k.shape
    _copy_slots_kernel[(source.shape[0], heads)](
        _bytes(cache.k),
        _bytes(cache.v),
        source,
        target,
        heads,
        page,
        dim,
        triton.next_power_of_2(dim),
        num_warps=1,
    )


def _bytes(cache: Tensor) -> Tensor:
    """Copies do not look inside a value, and not every device can load an 8-bit float."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def independent_runs(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut a chain of copies, to be done one after another, into runs that may each be done at once."""
    runs: list[tuple[list[int], list[int]]] = []
    touched: set[int] = set()
    written: set[int] = set()
    for a, b in zip(source, target, strict=True):
        if not runs or a in written or b in touched:
            runs.append(([], []))
            touched, written = set(), set()
        runs[-1][0].append(a)
        runs[-1][1].append(b)
        touched |= {a, b}
        written.add(b)
    return runs


def copy_blocks_reference(cache: LayerCache, source: Tensor, target: Tensor) -> None:
    for part in cache.tensors.values():
        part[target.long()] = part[source.long()]


def copy_slots_reference(cache: LayerCache, source: Tensor, target: Tensor) -> None:
    a, i = source // cache.block_size, source % cache.block_size
    b, j = target // cache.block_size, target % cache.block_size
    cache.k[b, :, j] = cache.k[a, :, i]
    cache.v[b, :, j] = cache.v[a, :, i]
