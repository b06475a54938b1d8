"""Prefill attention of deterministic mode on Hopper: the operations of `attention_mixed` with `exact`, tile by tile.

For tiles of 128 rows whose last turn of keys is all there: keys of another request are never read, not even to be
multiplied by zero. `split_tiles` says which tiles those are; the others are left to `attention_mixed`. Keys are folded
64 at a time at the same places, with the same tensor core instructions along k and the same order in each softmax, so
the bits should be the same; tests/gpu/test_bits.py compares them on a chip, which has not been done yet.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.attention_decode import LOG2_E
from quire.kernels.triton.linear_prefetch import available, multiprocessors
from quire.kernels.types import HeadShape, LayerCache

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.fixed_prefill_kernel import fixed_prefill_kernel
except ImportError:  # another version of Triton
    fixed_prefill_kernel = None

ROWS, KEYS, _HALF, _DIM = 128, 64, 64, 128
_STAGES, _REGISTERS = 5, 240
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def fits(device: torch.device, dtype: torch.dtype, shape: HeadShape, block_size: int) -> bool:
    """Whether the kernel knows such heads, such pages and this chip; windows, soft caps and sinks it does not know."""
    group = shape.num_heads // shape.num_kv_heads
    pages = block_size % 8 == 0 and KEYS % block_size == 0
    return available(device) and dtype in _KINDS and shape.head_dim == _DIM and 64 % group == 0 and pages


def tokens_of(shape: HeadShape) -> int:
    """Tokens of a tile."""
    return ROWS // (shape.num_heads // shape.num_kv_heads)


def whole_tokens(start: int, count: int, tokens: int) -> int:
    """How many of a chunk's `count` tokens, after `start` others, are in full tiles whose last turn of keys is there:
    those come first."""
    tiles = count // tokens
    while tiles and -(-(start + tiles * tokens) // KEYS) * KEYS > start + count:
        tiles -= 1
    return tiles * tokens


def split_tiles(
    starts: np.ndarray, counts: np.ndarray, tokens: int, first_seq: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sequence, first token) of the tiles that this kernel takes, those with the most keys first; and how many tokens
    of each chunk they are."""
    taken = np.array([whole_tokens(int(a), int(n), tokens) for a, n in zip(starts, counts, strict=True)], np.int64)
    tiles = taken // tokens
    seqs = np.repeat(np.arange(len(counts)), tiles)
    firsts = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    order = np.argsort(-(np.asarray(starts)[seqs] + firsts), kind="stable")
    return (seqs[order] + first_seq).astype(np.int32), firsts[order].astype(np.int32), taken


def fixed_prefill(
    qkv: Tensor, cache: LayerCache, tables: Tensor, rows: Tensor | None, query_start: Tensor, context_len: Tensor,
    tile_seq: Tensor, tile_first: Tensor, shape: HeadShape, scale: float, *, out: Tensor,
) -> None:
    """Causal attention of the queries in the tiles of `split_tiles`, into `out` [T, Hq*hd]."""
    items = tile_seq.shape[0] * shape.num_kv_heads
    if items == 0:
        return
    ring, sums, weights, stored = _layouts(_KINDS[qkv.dtype])
    fixed_prefill_kernel[(min(items, multiprocessors(qkv.device)),)](
        _paged(cache.k, cache.block_size, ring),
        _paged(cache.v, cache.block_size, ring),
        qkv,
        out,
        tables,
        tables if rows is None else rows,
        query_start,
        context_len,
        tile_seq,
        tile_first,
        items,
        scale * LOG2_E,
        qkv.stride(0),
        tables.stride(0),
        shape.num_heads,
        shape.num_kv_heads,
        shape.num_heads // shape.num_kv_heads,
        cache.block_size,
        KEYS,
        _STAGES,
        rows is not None,
        _REGISTERS,
        ring,
        sums,
        weights,
        stored,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=False,
    )


def _paged(part: Tensor, page: int, layout: Any) -> Any:
    """Keys or values as rows, for copies of half a page."""
    return TensorDescriptor.from_tensor(part.view(-1, _DIM), [page, _HALF], layout)


@lru_cache(maxsize=2)
def _layouts(kind: str) -> tuple[Any, Any, Any, Any]:
    """Of a ring's places, of sums, of what tensor cores multiply out of registers, of rows in memory."""
    sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ring = gl.NVMMASharedLayout.get_default_for([KEYS, _HALF], getattr(gl, kind))
    return ring, sums, gl.DotOperandLayout(0, sums, 2), gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
