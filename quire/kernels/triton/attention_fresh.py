"""Prefill attention of whole prompts (no context, window or soft cap): K and V are read from the step's qkv rows.

The copy engine (TMA) loads them, without a block table. As in `attention_mixed` a program takes some consecutive tokens
with all query heads that share a KV head. It has a single loop over keys whose last iterations mask, so the pipeline
fills only once: on short prompts that is most of the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.attention_decode import LOG2_E
from quire.kernels.triton.attention_mixed import MixedShape
from quire.kernels.types import HeadShape


@triton.jit
def _fresh_mixed_kernel(
    parts,
    qkv,
    out,
    query_start,
    tile_seq,
    tile_first,
    scale,
    q_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """`parts` describes qkv in pieces of [KEYS, DIM]. Every sequence of the tiles has at least KEYS tokens."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    seq = tl.load(tile_seq + tile)
    if seq >= 0:
        first = tl.load(tile_first + tile)
        begin = tl.load(query_start + seq)
        length = tl.load(query_start + seq + 1) - begin
        TOKENS: tl.constexpr = ROWS // GROUP
        index = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM)
        token = first + index // GROUP
        used = ((index < TOKENS * GROUP) & (token < length))[:, None] & (dim < DIM)[None, :]
        place = (begin + token).to(tl.int64)[:, None]
        column = (head * GROUP + index % GROUP)[:, None] * DIM + dim[None, :]
        q = tl.load(qkv + place * q_stride + column, mask=used, other=0.0)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        # Up to here every row sees every key.
        open_end = (first + 1) // KEYS * KEYS
        for start in range(0, tl.minimum(first + TOKENS, length), KEYS):
            # The last keys are read with some before them, which the mask leaves out, rather than with the next
            # prompt's: nothing of another request is touched, not even to be multiplied by zero.
            at = tl.minimum(start, length - KEYS)
            k = parts.load([begin + at, (NUM_HEADS + head) * DIM])
            scores = tl.dot(q, tl.trans(k))
            if start >= open_end:
                position = at + tl.arange(0, KEYS)
                seen = (position[None, :] <= token[:, None]) & (position >= start)[None, :]
                scores = tl.where(seen, scores, float("-inf"))
            # The first keys hold one that a row sees, so no maximum stays at -inf.
            higher = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
            weights = tl.exp2(scores * scale - higher[:, None])
            shrink = tl.exp2(maximum - higher)
            total = total * shrink + tl.sum(weights, axis=1)
            v = parts.load([begin + at, (NUM_HEADS + NUM_KV + head) * DIM])
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None])
            maximum = higher
        result = acc * (1.0 / total)[:, None]
        tl.store(out + place * (NUM_HEADS * DIM) + column, result.to(out.dtype.element_ty), mask=used)


def fresh_fits(shape: HeadShape, dtype: torch.dtype) -> bool:
    """Whether the kernel knows such heads: whole tiles of a 16-bit type."""
    return shape.head_dim in (64, 128) and dtype in (torch.bfloat16, torch.float16)


def fresh_attention(
    qkv: Tensor,
    query_start: Tensor,
    tile_seq: Tensor,
    tile_first: Tensor,
    shape: HeadShape,
    scale: float,
    *,
    out: Tensor | None = None,
    sizes: MixedShape = MixedShape(128, 64, 4, 3),  # noqa: B008 (frozen)
) -> Tensor:
    """[T, Hq*hd]: causal attention of whole prompts of `sizes.keys` tokens or more, in the tiles of `query_tiles`; a
    tile whose sequence is -1 does nothing. qkv is rotated already."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    group = shape.num_heads // shape.num_kv_heads
    if out is None:
        out = torch.empty(qkv.shape[0], shape.num_heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    parts = TensorDescriptor(qkv, list(qkv.shape), list(qkv.stride()), [sizes.keys, shape.head_dim])
    _fresh_mixed_kernel[(shape.num_kv_heads, tile_seq.shape[0])](
        parts, qkv, out, query_start, tile_seq, tile_first, scale * LOG2_E, qkv.stride(0),
        NUM_HEADS=shape.num_heads,
        NUM_KV=shape.num_kv_heads,
        GROUP=group,
        DIM=shape.head_dim,
        ROWS=sizes.rows_of(group),
        KEYS=sizes.keys,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )  # fmt: skip
    return out
