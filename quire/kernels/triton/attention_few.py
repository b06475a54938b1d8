"""Decode attention of one or two sequences (of up to eight beside `cuda.few_gemm`), or of few rows with drafts, over
the projection's raw q, k, v (Hopper): its time is latency.

As `attention_rope`: norm, rotation and the KV write are part of it. There the keys of a piece are read after q is
rotated; here before the kernel before has ended. Heads of 128 features, at most eight query heads to a KV head, keys in
the activations' type or in fp8; neither soft cap nor sinks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quire.kernels.triton.attention_decode import LOG2_E, DecodeScratch
from quire.kernels.triton.attention_rope import rope_fits
from quire.kernels.triton.attention_split import PIECE_STEP, DecodeSplit
from quire.kernels.types import HeadShape, HeadTurn, LayerCache

try:
    from triton.experimental.gluon import language as gl

    from quire.kernels.triton.attention_few_kernel import few_decode_kernel
except ImportError:  # another version of Triton
    few_decode_kernel = None

_DIM, _MOST_QUERIES = 128, 8
_KEYS, _WARPS = 128, 8
MOST_SEQUENCES = 2
"""Beyond it bandwidth counts, and programs of `attention_rope` that share a multiprocessor."""
MOST_BESIDE_FEW = 8
"""The same where GEMMs of few rows are `cuda.few_gemm`'s, which find no room beside `attention_rope`. H200, 2026-11-18,
Qwen3-8B's shapes, eight streams of 40 keys: 5.45 ms a token with `attention_rope`, 4.12 with this kernel; of 2,000 keys
6.11 and 5.01."""
MOST_DRAFTED = 8
"""Rows of a step with drafts: as many as the kernel looks back for rows of one sequence."""
_HOPPER = 9


def fits(device: torch.device, dtype: torch.dtype, shape: HeadShape, turn: HeadTurn, cache: LayerCache) -> bool:
    """Whether the kernel runs there and knows such heads and such a cache."""
    known = few_decode_kernel is not None and device.type == "cuda"
    if not known or torch.cuda.get_device_capability(device)[0] < _HOPPER:
        return False
    return takes(dtype, shape, turn, cache)


def takes(dtype: torch.dtype, shape: HeadShape, turn: HeadTurn, cache: LayerCache) -> bool:
    """Whether the kernel knows such heads and such a cache."""
    queries = shape.num_heads // shape.num_kv_heads
    plain = dtype in (torch.bfloat16, torch.float16) and (
        cache.k.dtype == torch.float8_e4m3fn or (cache.k.dtype == dtype and cache.scales is None))
    heads = shape.head_dim == _DIM and queries <= _MOST_QUERIES and turn.sinks is None
    return plain and heads and rope_fits(shape, turn)


def few_decode_attention(
    qkv: Tensor,
    cache: LayerCache,
    tables: Tensor,
    rows: Tensor | None,
    context_len: Tensor,
    split: DecodeSplit,
    scratch: DecodeScratch,
    shape: HeadShape,
    scale: float,
    turn: HeadTurn,
    *,
    window: int | None = None,
    out: Tensor | None = None,
    drafts: bool = False,
    pdl: bool = False,
) -> Tensor:
    """As `rope_decode_attention`. `drafts`: rows that follow one another may be of one sequence, one position after
    another; each reads the keys of those before it."""
    if out is None:
        out = torch.empty(context_len.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    few_decode_kernel[(shape.num_kv_heads * split.tasks,)](
        qkv, cache.k, cache.v, cache.k.view(torch.int32) if cache.k.element_size() == 1 else cache.k,
        out, tables, tables if rows is None else rows, context_len,
        split.sequence, split.piece, split.count, split.length,
        scratch.partial, scratch.summary, scratch.arrived,
        turn.rope,
        turn.rope if turn.q_norm is None else turn.q_norm,
        turn.rope if turn.k_norm is None else turn.k_norm,
        turn.eps, scale * LOG2_E, 1 << 30 if window is None else window,
        context_len if cache.scales is None else cache.scales,
        scratch.partial.shape[0], qkv.stride(0), tables.stride(0),
        shape.num_heads, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim, cache.block_size,
        _KEYS, PIECE_STEP, rows is not None, turn.q_norm is not None, drafts, pdl,
        cache.scales is not None,
        *_layouts(),
        num_warps=_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@lru_cache(maxsize=1)
def _layouts() -> tuple[Any, ...]:
    """How sums, values as they are loaded, and what is joined lie in registers; and values in shared memory."""
    sums = gl.NVMMADistributedLayout([2, 0], [_WARPS, 1], [16, 8])
    value = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    join = gl.BlockedLayout([16, 1, 4], [1, 1, 32], [1, _WARPS, 1], [2, 1, 0])
    return sums, value, join, gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
