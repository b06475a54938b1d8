"""Prefill attention on Hopper over paged keys, in tiles of 128 rows of queries: prompts and chunks of any context.
In deterministic mode also decode steps, in tiles of 64.

Keys are folded 128 at a time at the places of `attention_mixed` with as many, with the same tensor core instructions
along k and the same operations in the same order in each softmax, so the bits are the same (tests/gpu/test_bits.py
compares them on a chip): a row of deterministic mode may come from either. No value that is not the sequence's own gets
into a product, not even times zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.attention_decode import LOG2_E
from quire.kernels.triton.attention_rope import rope_fits
from quire.kernels.triton.linear_prefetch import available, multiprocessors
from quire.kernels.types import HeadShape, HeadTurn, LayerCache

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.hopper_prefill_kernel import hopper_prefill_kernel
except ImportError:  # another version of Triton
    hopper_prefill_kernel = None

_HALF, _DIM = 64, 128
_REGISTERS = 240
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Keys of a turn, turns on their way, warp groups of 64 rows, programs on a multiprocessor, and programs that share
    a head's values."""

    keys: int
    stages: int
    groups: int = 2
    programs: int = 1
    parts: int = 1

    def tokens_of(self, shape: HeadShape) -> int:
        """Tokens of a tile."""
        return self.groups * 64 // (shape.num_heads // shape.num_kv_heads)


PREFILL = PrefillShape(128, 3)
"""H200, 2026-11-18, 32 heads, TFLOP/s of chunks of 8,192 tokens after 24,576 and 118,784 others: 566 and 530 (by
`attention_mixed` 446 and 383); of 8 chunks of 1,000: 377. With each warp group's softmax beside its own products of
weights and values, as well: 563, 540 and 331."""
DECODE = PrefillShape(128, 3, groups=1)
"""Tiles of 64 rows, as `attention_mixed` has them in deterministic mode."""
DECODE_FEW = PrefillShape(128, 4, groups=1, parts=2)
"""The same for so few pieces of work that two programs can share each. H200, 2026-11-20, one sequence of 0.6B through
`generate`: 0.658 ms a token (`DECODE` 0.687). Same bits."""
DECODE_MANY = PrefillShape(128, 1, groups=1, programs=2)
"""The same for more pieces of work than multiprocessors: while one program waits, the other multiplies. H200,
2026-11-18, 32 heads, us: 256 sequences of 1,064 keys 268 (`DECODE` 279), 32 of 1,152 40.4 (41.7). Same bits."""
_MOST_TURNED = 8
"""Query heads of a KV head that a decode step may rotate in a tile of 16."""


@dataclass(frozen=True, slots=True)
class RawHeads:
    """What a decode step's heads still need: norm and rotation at these positions, and a slot of the cache for each
    token."""

    turn: HeadTurn
    positions: Tensor
    slots: Tensor


def decode_sizes(tiles: int, shape: HeadShape, device: torch.device) -> PrefillShape:
    """For so many sequences that decode."""
    items, room = tiles * shape.num_kv_heads, multiprocessors(device)
    return DECODE_FEW if 2 * items <= room else DECODE if items <= room else DECODE_MANY


def turns(shape: HeadShape, turn: HeadTurn) -> bool:
    """Whether a decode step with such heads, where it `fits`, may come as its projection left it."""
    return rope_fits(shape, turn) and turn.sinks is None and shape.num_heads <= _MOST_TURNED * shape.num_kv_heads


def knows(device: torch.device, dtype: torch.dtype, shape: HeadShape) -> bool:
    """Whether the kernel knows such heads and this chip, however many heads there are."""
    return available(device) and dtype in _KINDS and shape.head_dim == _DIM


def fits(
    device: torch.device, dtype: torch.dtype, shape: HeadShape, block_size: int, sizes: PrefillShape = PREFILL
) -> bool:
    """Whether it knows such pages too, and as many heads; windows, soft caps and sinks it does not know."""
    pages = block_size % 8 == 0 and sizes.keys % block_size == 0
    return knows(device, dtype, shape) and 64 % (shape.num_heads // shape.num_kv_heads) == 0 and pages


def split_tiles(
    starts: np.ndarray, counts: np.ndarray, shape: HeadShape, sizes: PrefillShape = PREFILL
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sequence, first token) of the tiles that this kernel takes, those with the most keys first; and how many tokens
    of each chunk they are: all, but for a single one, which decodes."""
    tokens = sizes.tokens_of(shape)
    taken = np.where(np.asarray(counts) > 1, counts, 0).astype(np.int64)
    tiles = -(-taken // tokens)
    seqs = np.repeat(np.arange(len(counts)), tiles)
    firsts = (np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    order = np.argsort(-(np.asarray(starts)[seqs] + firsts), kind="stable")
    return seqs[order].astype(np.int32), firsts[order].astype(np.int32), taken


def hopper_prefill(
    qkv: Tensor, cache: LayerCache, tables: Tensor, rows: Tensor | None, query_start: Tensor, context_len: Tensor,
    tile_seq: Tensor, tile_first: Tensor, shape: HeadShape, scale: float, *, out: Tensor,
    sizes: PrefillShape = PREFILL, pdl: bool = False, late: bool = False, raw: RawHeads | None = None,
) -> None:
    """Causal attention of the queries in the tiles, into `out` [T, Hq*hd]. The cache has the type of qkv, and its
    scales count.

    With one warp group steps may be padded: a tile whose sequence is -1 does nothing, a sequence without keys gets
    zeros. With `raw`, where `turns`, every sequence has one query, which sees no key of the step but its own; qkv is as
    the projection left it and stays so, and the cache gets the step's keys and values."""
    items = tile_seq.shape[0] * shape.num_kv_heads * sizes.parts
    if items == 0:
        return
    ring, sums, values, stored, own = _layouts(_KINDS[qkv.dtype], sizes.keys)
    normed = raw is not None and raw.turn.q_norm is not None
    hopper_prefill_kernel[(min(items, sizes.programs * multiprocessors(qkv.device)),)](
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
        *_turn_arguments(raw, cache, qkv),
        items,
        scale * LOG2_E,
        context_len if cache.scales is None else cache.scales,
        qkv.stride(0),
        tables.stride(0),
        shape.num_heads,
        shape.num_kv_heads,
        shape.num_heads // shape.num_kv_heads,
        cache.block_size,
        sizes.keys,
        sizes.stages,
        rows is not None,
        sizes.groups,
        raw is not None,
        normed,
        pdl,
        cache.scales is not None,
        _REGISTERS,
        ring,
        sums,
        values,
        stored,
        own,
        sizes.parts,
        num_warps=4,
        maxnreg=168 if sizes.groups == 2 else 128,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl and not late else {}),
    )


def _turn_arguments(raw: RawHeads | None, cache: LayerCache, unused: Tensor) -> tuple[Any, ...]:
    if raw is None:
        return (*(unused,) * 5, 0.0, unused, unused)
    turn = raw.turn
    parts = (unused if part is None else part for part in (turn.rope, turn.q_norm, turn.k_norm))
    return raw.slots, raw.positions, *parts, turn.eps, cache.k, cache.v


def _paged(part: Tensor, page: int, layout: Any) -> Any:
    """Keys or values as rows, for copies of half a page."""
    return TensorDescriptor.from_tensor(part.view(-1, _DIM), [page, _HALF], layout)


@lru_cache(maxsize=4)
def _layouts(kind: str, keys: int) -> tuple[Any, Any, Any, Any, Any]:
    """Of a ring's places, of scores, of sums of values, of rows in memory, of single rows in shared memory."""
    scores, values = (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16]) for columns in (keys, _HALF))
    ring = gl.NVMMASharedLayout.get_default_for([keys, _HALF], getattr(gl, kind))
    stored, own = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]), gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring, scores, values, stored, own
