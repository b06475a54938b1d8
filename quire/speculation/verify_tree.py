"""Rejection on a draft tree: which branch the target accepts, and which token of its own follows it.

At a node the children are tried in order. A child x sampled from q is accepted with probability min(1, p(x)/q(x)); else
p becomes max(0, p - q), normalised, and the next child is tried. After the last rejected child the token is sampled
from what is left of p. A child chosen for its value, say as the likeliest, has q = 1 at x: it is accepted with
probability p(x), and its rejection only removes its own share of p. In both cases the token at the node is distributed
as p, whatever the children are:

    P(y) = min(p(y), q(y)) + P(rejected) * r(y),   r the distribution of what follows a rejection;

r is max(0, p - q) / P(rejected) by induction over the children that are left, so P(y) = p(y).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.batch import SamplingBatch
from quire.sampling.philox import Purpose
from quire.sampling.sampler import draw_weights
from quire.speculation.tree import ancestry
from quire.speculation.verify import NoiseKeys, RejectionDraw, pick, share


@dataclass(slots=True)
class _Walk:
    """State of the walk of each row of a batch."""

    node: Tensor
    """Last accepted node; -1: none yet."""
    depth: Tensor
    tried: Tensor
    """Children of `node` that were rejected."""
    left: Tensor
    """float64 [B, V]: what rejected children have left of p."""


def judge_tree(drafts: Tensor, parents: Tensor, target: Tensor, proposal: Tensor | None, keys: NoiseKeys
               ) -> tuple[Tensor, Tensor, Tensor]:
    """(last accepted node [B], -1: none; nodes accepted [B]; the token after them [B]) of a batch of trees.

    `drafts` and `parents` are [B, N]; rows with fewer nodes are padded with drafts of -1. `target` [B, N + 1, V] are
    weights proportional to p before the first draft and after each of them. `proposal` [B, N, V] are the weights that
    each draft was sampled with, given its siblings before it; all 0, or None: it was chosen for its value.
    """
    none = torch.full((len(drafts),), -1, dtype=torch.int64, device=drafts.device)
    walk = _Walk(none, torch.zeros_like(none), torch.zeros_like(none), share(target[:, 0]))
    for node in range(drafts.shape[1]):
        draft = drafts[:, node]
        here = (walk.node == parents[:, node]) & (draft >= 0)
        # On a CPU checking first is cheaper than the sums; on a GPU it would synchronise.
        if drafts.device.type == "cpu" and not bool(here.any()):
            continue
        q = torch.zeros_like(walk.left).scatter_(1, draft.clamp(min=0)[:, None], 1.0)
        if proposal is not None:
            drawn = share(proposal[:, node])
            q = torch.where((drawn.sum(1) > 0.0)[:, None], drawn, q)
        _try_child(walk, here, draft.clamp(min=0)[:, None], q, target[:, node + 1], node, keys)
    noise = torch.where(walk.tried > 0, keys.noise(Purpose.RESAMPLE, walk.depth),
                        keys.noise(Purpose.SAMPLE, walk.depth))
    return walk.node, walk.depth, pick(walk.left, noise)


def _try_child(walk: _Walk, here: Tensor, draft: Tensor, q: Tensor, after: Tensor, node: int, keys: NoiseKeys) -> None:
    """Try one child on the rows in `here`, whose walk is at its parent."""
    noise = keys.noise(Purpose.ACCEPT, walk.depth, walk.tried)
    keeps = here & (noise * q.gather(1, draft).squeeze(1) < walk.left.gather(1, draft).squeeze(1))
    refuses = here & ~keeps
    rest = (walk.left - q).clamp_(min=0.0)
    total = rest.sum(1, keepdim=True)
    # Where p equals q nothing is left, and only rounding can have rejected the child.
    changes = refuses & (total.squeeze(1) > 0.0)
    walk.left = torch.where(changes[:, None], rest / total.clamp(min=1e-300), walk.left)
    walk.left = torch.where(keeps[:, None], share(after), walk.left)
    walk.tried = torch.where(keeps, 0, walk.tried + refuses.long())
    walk.depth = walk.depth + keeps.long()
    walk.node = torch.where(keeps, node, walk.node)


def put_trees_in_place(drawn: list[int], logits: Tensor, draws: Sequence[RejectionDraw]) -> dict[int, int]:
    """Verify trees by rejection and write the tokens into `drawn`; how many drafts were accepted, by `first`."""
    kept_by_first: dict[int, int] = {}
    for draw in draws:
        rows = logits[draw.first : draw.first + 1 + len(draw.drafts)]
        target = draw_weights(rows, SamplingBatch.build(draw.rows, logits.shape[1]))
        proposal = None if draw.proposal is None else draw.proposal[None]
        last, kept, token = (int(found) for found in judge_tree(
            torch.tensor([draw.drafts]), torch.tensor([draw.parents]), target[None], proposal,
            NoiseKeys.of(draw.rows[:1])))
        path = [] if last < 0 else ancestry(draw.parents)[last]
        for before, node in zip([-1, *path], path, strict=False):
            drawn[draw.first + 1 + before] = draw.drafts[node]
        drawn[draw.first + 1 + last] = token
        kept_by_first[draw.first] = kept
    return kept_by_first
