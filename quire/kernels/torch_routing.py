"""The choice of experts in plain torch: what a CPU runs, and what the kernels are held against."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.routing import RouterSpec


def choose_experts(logits: Tensor, spec: RouterSpec, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts [T, top_k] of each row, best first, and their weights in float32.

    In float64: a vectorised float32 function may round differently at another place of the batch. Of equal scores the
    lower expert wins.
    """
    raw = logits.to(torch.float64)
    scores = raw.softmax(-1) if spec.score == "softmax" else raw.sigmoid()
    ranked = scores if choice_bias is None else scores + choice_bias.to(torch.float64)
    if spec.groups > 1:
        ranked = _in_best_groups(ranked, spec)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(-1, chosen)
    if spec.renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, (weights * spec.scale).to(torch.float32)


def _in_best_groups(ranked: Tensor, spec: RouterSpec) -> Tensor:
    """The scores, with those of experts outside the best groups below all others."""
    grouped = ranked.view(ranked.shape[0], spec.groups, -1)
    best = grouped.sort(dim=-1, descending=True, stable=True).values
    count = best[..., 0] if spec.group_score == "best" else best[..., :2].sum(-1)
    kept = count.sort(dim=-1, descending=True, stable=True).indices[:, : spec.chosen_groups]
    open_ = torch.zeros_like(count, dtype=torch.bool).scatter_(-1, kept, True)
    return grouped.masked_fill(~open_.unsqueeze(-1), float("-inf")).view(ranked.shape)
