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
