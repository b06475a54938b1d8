"""Pages of a cache in fp8, unpacked to the activations' type for a kernel that knows no other (`hopper_prefill`).

Attention of a chunk to a long context is bound by its products, of which each key has thousands: one pass over a
layer's pages is little beside it, while tiles that convert what they read convert each key once for each of them. What
fp8 says is exact in bf16 and fp16; the scales of heads are left to whoever reads the pages. All layers share one room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.types import HeadShape, LayerCache

MOST_BYTES = 512 << 20
"""Of the room: 131,072 tokens of 8 heads of 128."""
LEAST_QUERIES = 32
"""A chunk of fewer does not repay the pass over its context."""
_MOST_AT_ONCE = 8192


@dataclass(slots=True)
class PageRoom:
    """Memory for some unpacked pages, and a block table in which each of them is itself."""

    k: Tensor
    v: Tensor
    numbers: Tensor
    """int32 [pages]: a table of rows that begin one page after another."""

    @classmethod
    def allocate(
        cls, shape: HeadShape, block_size: int, most_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> PageRoom:
        """For as many tokens as there may be, but for no more than fit into `MOST_BYTES`."""
        each = shape.num_kv_heads * block_size * shape.head_dim
        pages = max(1, min(-(-most_tokens // block_size), MOST_BYTES // (2 * each * dtype.itemsize)))
        size = (pages, shape.num_kv_heads, block_size, shape.head_dim)
        k, v = (torch.empty(size, dtype=dtype, device=device) for _ in range(2))
        return cls(k, v, torch.arange(pages, dtype=torch.int32, device=device))

    @property
    def pages(self) -> int:
        return self.k.shape[0]

    def takes(self, shape: HeadShape, block_size: int) -> bool:
        """Whether pages of such heads lie in it."""
        return self.k.shape[1:] == (shape.num_kv_heads, block_size, shape.head_dim)

    def table(self) -> Tensor:
        """With this one, the row of a sequence's table is the first of its pages."""
        return self.numbers[:, None]


@dataclass(frozen=True, slots=True)
class UnpackedPages:
    """Which pages of a step's sequences are unpacked."""

    sequence: Tensor
    """int32 [pages]: whose each page of the room is; a sequence's pages are neighbours, in order."""
    first: Tensor
    """int32 [sequences]: where its pages begin; of one without any it does not matter."""


def choose_pages(
    starts: np.ndarray, counts: np.ndarray, block_size: int, room: int
) -> tuple[np.ndarray, np.ndarray]:
    """What `UnpackedPages` says of a step, on the host: the pages of chunks of many queries, one after another as long
    as there is room for them."""
    pages = np.where(np.asarray(counts) >= LEAST_QUERIES, -(-(np.asarray(starts) + counts) // block_size), 0)
    first, used = np.zeros(len(pages), np.int32), 0
    for seq, needed in enumerate(pages.tolist()):
        if used + needed > room:
            pages[seq] = 0
        else:
            first[seq], used = used, used + needed
    return np.repeat(np.arange(len(pages), dtype=np.int32), pages), first


@triton.jit
def _unpack_kernel(
    k_cache, v_cache, k_out, v_out, tables, rows, sequence, first, table_stride, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """A program copies a page: all heads' keys and values of some tokens."""
    place = tl.program_id(0)
    seq = tl.load(sequence + place)
    row = seq
    if HAS_ROWS:
        row = tl.load(rows + seq)
    page = place - tl.load(first + seq)
    block = tl.load(tables + row.to(tl.int64) * table_stride + page).to(tl.int64)
    source = block * SIZE
    target = place.to(tl.int64) * SIZE
    for start in tl.static_range(0, SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        k = tl.load(k_cache + source + index)
        v = tl.load(v_cache + source + index)
        # By way of float32: from fp16 to bf16 there is only a slow instruction.
        tl.store(k_out + target + index, k.to(tl.float32).to(k_out.dtype.element_ty))
        tl.store(v_out + target + index, v.to(tl.float32).to(v_out.dtype.element_ty))


def unpack_pages(
    cache: LayerCache, tables: Tensor, rows: Tensor | None, chosen: UnpackedPages, room: PageRoom
) -> LayerCache:
    """The room as a cache of these pages, with the scales of the other one; its block table is `room.table()` with the
    rows `chosen.first`."""
    sequence, first = chosen.sequence, chosen.first
    size = room.k[0].numel()
    _unpack_kernel[(sequence.shape[0],)](
        cache.k, cache.v, room.k, room.v, tables, tables if rows is None else rows, sequence, first, tables.stride(0),
        size, min(_MOST_AT_ONCE, size & -size), rows is not None, num_warps=4,
    )  # fmt: skip
    return LayerCache(cache.spec, cache.block_size, {"k": room.k, "v": room.v}, scales=cache.scales)


def unpack_reference(
    cache: LayerCache, tables: Tensor, rows: Tensor | None, chosen: UnpackedPages, room: PageRoom
) -> LayerCache:
    first = chosen.first.tolist()
    for place, seq in enumerate(chosen.sequence.tolist()):
        block = tables[seq if rows is None else int(rows[seq]), place - first[seq]]
        for part, whole in ((room.k, cache.k), (room.v, cache.v)):
            part[place] = whole[block].to(part.dtype)
    return LayerCache(cache.spec, cache.block_size, {"k": room.k, "v": room.v}, scales=cache.scales)
