"""Norms in plain torch: what the kernels are held against."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.slices import add_in_tree


def norm_all_heads(
    qkv: Tensor, num_heads: int, num_kv_heads: int, q_norm: Tensor, k_norm: Tensor, eps: float
) -> None:
    """In place on qkv: RMS norm of q over all its heads together, then of k; squares summed by heads, in float32."""
    dim = q_norm.shape[0] // num_heads
    heads = qkv.view(qkv.shape[0], -1, dim)
    for first, count, weight in ((0, num_heads, q_norm), (num_heads, num_kv_heads, k_norm)):
        part = heads[:, first : first + count]
        wide = part.float()
        squares = add_in_tree(wide.pow(2).sum(-1).unbind(-1))
        factor = torch.rsqrt(squares / (count * dim) + eps)
        part.copy_((wide * factor[:, None, None] * weight.view(count, dim)).to(qkv.dtype))


def head_squares(qkv: Tensor, num_heads: int, dim: int) -> Tensor:
    """float32 [T, num_heads]: the sum of squares of each of the first heads of a row."""
    heads = qkv.view(qkv.shape[0], -1, dim)
    return heads[:, :num_heads].float().pow(2).sum(-1)


def norm_some_heads(part: Tensor, squares: Tensor, weight: Tensor, dim: int, eps: float) -> None:
    """In place on `part` [T, heads * dim]: these heads' part of an RMS norm over all heads, whose squares are given."""
    total = add_in_tree(squares.unbind(-1))
    factor = torch.rsqrt(total / (squares.shape[1] * dim) + eps)
    part.copy_((part.float() * factor[:, None] * weight).to(part.dtype))
