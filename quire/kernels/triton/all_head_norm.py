"""RMS norm of q over all its heads together, and of k: a sum of squares for each head, then one tree over the heads.

Two launches, each with a program for a head, so that a head's bits do not depend on how many others are here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch_norm import norm_all_heads as norm_all_heads_reference
from quire.kernels.types import HeadShape

__all__ = ["norm_all_heads", "norm_all_heads_reference"]


@triton.jit
def _head_squares_kernel(qkv, squares, stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    values = tl.load(qkv + token * stride + head * DIM + place, mask=place < DIM, other=0.0).to(tl.float32)
    tl.store(squares + token * tl.num_programs(1) + head, tl.sum(values * values, axis=0))


@triton.jit
def _scale_heads_kernel(
    qkv,
    squares,
    q_norm,
    k_norm,
    eps,
    stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One head of q or k. HEADS is a power of two: zeros beyond the last head leave every sum of the tree as it is."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_q = head < NUM_HEADS
    first = tl.where(is_q, 0, NUM_HEADS)
    count = tl.where(is_q, NUM_HEADS, NUM_KV)
    other = tl.arange(0, HEADS)
    sums = tl.load(squares + token * (NUM_HEADS + NUM_KV) + first + other, mask=other < count, other=0.0)
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, (HEADS >> (level + 1), 2)), axis=1)
    factor = tl.rsqrt(tl.sum(sums, axis=0) / (count * DIM) + eps)
    place = tl.arange(0, BLOCK)
    inside = place < DIM
    gain = tl.load(tl.where(is_q, q_norm, k_norm) + (head - first) * DIM + place, mask=inside, other=0.0)
    where = qkv + token * stride + head * DIM + place
    values = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    tl.store(where, (values * factor * gain).to(qkv.dtype.element_ty), mask=inside)


def norm_all_heads(qkv: Tensor, shape: HeadShape, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
    """In place on qkv [T, shape.width]; the weights are float32 [heads * head_dim]."""
    tokens, heads = qkv.shape[0], shape.num_heads + shape.num_kv_heads
    if tokens == 0:
        return
    squares = torch.empty(tokens, heads, dtype=torch.float32, device=qkv.device)
    block = triton.next_power_of_2(shape.head_dim)
    width = triton.next_power_of_2(max(shape.num_heads, shape.num_kv_heads))
    grid = (tokens, heads)
    _head_squares_kernel[grid](qkv, squares, qkv.stride(0), shape.head_dim, block, num_warps=1)
    _scale_heads_kernel[grid](
        qkv, squares, q_norm, k_norm, eps, qkv.stride(0), shape.num_heads, shape.num_kv_heads, shape.head_dim, block,
        width, width.bit_length() - 1, num_warps=1,
    )  # fmt: skip
