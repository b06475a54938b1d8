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
    OWN_HEADS: tl.constexpr,  # query heads of the row
    NUM_HEADS: tl.constexpr,  # of all ranks, whose squares are here
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One head of q or k. HEADS is a power of two: zeros beyond the last head leave every sum of the tree as it is."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_q = head < OWN_HEADS
    first = tl.where(is_q, 0, NUM_HEADS)
    count = tl.where(is_q, NUM_HEADS, NUM_KV)
    other = tl.arange(0, HEADS)
    sums = tl.load(squares + token * (NUM_HEADS + NUM_KV) + first + other, mask=other < count, other=0.0)
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, (HEADS >> (level + 1), 2)), axis=1)
    factor = tl.rsqrt(tl.sum(sums, axis=0) / (count * DIM) + eps)
    place = tl.arange(0, BLOCK)
    inside = place < DIM
    own = tl.where(is_q, head, head - OWN_HEADS)
    gain = tl.load(tl.where(is_q, q_norm, k_norm) + own * DIM + place, mask=inside, other=0.0)
    where = qkv + token * stride + head * DIM + place
    values = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    tl.store(where, (values * factor * gain).to(qkv.dtype.element_ty), mask=inside)


def norm_all_heads(qkv: Tensor, shape: HeadShape, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
    """In place on qkv [T, shape.width]; the weights are float32 [heads * head_dim]."""
    squares = head_squares(qkv, shape)
    _scale(qkv, shape, squares, shape.num_heads, q_norm, k_norm, eps)


def head_squares(qkv: Tensor, shape: HeadShape) -> Tensor:
    """float32 [T, heads of q and k]: the sum of squares of each."""
    tokens, heads = qkv.shape[0], shape.num_heads + shape.num_kv_heads
    squares = torch.empty(tokens, heads, dtype=torch.float32, device=qkv.device)
    if tokens:
        block = triton.next_power_of_2(shape.head_dim)
        _head_squares_kernel[(tokens, heads)](qkv, squares, qkv.stride(0), shape.head_dim, block, num_warps=1)
    return squares


def norm_some_heads(
    qkv: Tensor, shape: HeadShape, squares: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], eps: float
) -> None:
    """`norm_all_heads` where the row has some of the heads only: `squares` are those of all query heads and of all kv
    heads, the weights those of the heads that are here."""
    _scale(qkv, shape, torch.cat(squares, 1), squares[0].shape[1], *norms, eps)


def _scale(
    qkv: Tensor, shape: HeadShape, squares: Tensor, num_heads: int, q_norm: Tensor, k_norm: Tensor, eps: float
) -> None:
    """`squares`: of `num_heads` query heads, then of kv heads."""
    tokens, num_kv = qkv.shape[0], squares.shape[1] - num_heads
    if tokens == 0:
        return
    width = triton.next_power_of_2(max(num_heads, num_kv))
    _scale_heads_kernel[(tokens, shape.num_heads + shape.num_kv_heads)](
        qkv, squares, q_norm, k_norm, eps, qkv.stride(0), shape.num_heads, num_heads, num_kv, shape.head_dim,
        triton.next_power_of_2(shape.head_dim), width, width.bit_length() - 1, num_warps=1,
    )  # fmt: skip
