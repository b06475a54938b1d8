"""Dense attention in plain torch: the formula that every kernel is held against."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, Hq, hd] over k, v [Hkv, L, hd]; query heads share a key head in order. `sinks` [Hq]
    are scores without a value."""
    share = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    scores = torch.einsum("thd,hld->htl", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1)[..., : v.shape[1]]
    return torch.einsum("htl,hld->thd", weights, v)
