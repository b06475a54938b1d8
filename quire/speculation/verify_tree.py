"""Which branch of a draft tree the target keeps, by rejection, and which token of its own follows it.

At a node the target's p is tried on the children, in order. A child x that was drawn from q is kept with probability
min(1, p(x)/q(x)); else p becomes max(0, p - q), normalised, and the next child is tried. After the last refused child
the token is drawn from what is left of p. A child that was chosen for its value, say as the likeliest, was not drawn:
its q is 1 at x, so it is kept with probability p(x), and refused it only takes its own share out of p. In both cases
the token at the node is distributed as p, whatever the children are:

    P(y) = min(p(y), q(y)) + P(refused) * r(y),   r the distribution of what follows a refusal;

r is max(0, p - q) / P(refused) by induction over the children that are left, so P(y) = p(y).
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
    """How far each row of a batch has come."""

    node: Tensor
    """-1: before the first draft."""
    depth: Tensor
    tried: Tensor
    """Children of the node that were refused."""
    left: Tensor
    """float64 [B, V]: what they have left of p."""


def judge_tree(drafts: Tensor, parents: Tensor, target: Tensor, proposal: Tensor | None, keys: NoiseKeys
               ) -> tuple[Tensor, Tensor, Tensor]:
    """(last node kept [B], -1: none; nodes kept [B]; the token after them [B]) of a batch of trees.

    `drafts` and `parents` are [B, N], a row that has fewer ends with drafts of -1. `target` are weights [B, N + 1, V],
    proportional to p before the first draft and after each of them. `proposal` [B, N, V] are those that each draft was
    drawn with, given its siblings before it; where they are all 0, and everywhere without any, it was chosen by value.
    """
    none = torch.full((len(drafts),), -1, dtype=torch.int64, device=drafts.device)
    walk = _Walk(none, torch.zeros_like(none), torch.zeros_like(none), share(target[:, 0]))
    for node in range(drafts.shape[1]):
        draft = drafts[:, node]
        here = (walk.node == parents[:, node]) & (draft >= 0)
        # On a CPU a look is cheaper than the sums; a GPU would have to be waited for.
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
    """Try one child on the rows that are `here`, at its parent."""
    noise = keys.noise(Purpose.ACCEPT, walk.depth, walk.tried)
    keeps = here & (noise * q.gather(1, draft).squeeze(1) < walk.left.gather(1, draft).squeeze(1))
    refuses = here & ~keeps
    rest = (walk.left - q).clamp_(min=0.0)
    total = rest.sum(1, keepdim=True)
    # Where p and q are equal nothing is left, and nothing is refused but for rounding.
    changes = refuses & (total.squeeze(1) > 0.0)
    walk.left = torch.where(changes[:, None], rest / total.clamp(min=1e-300), walk.left)
    walk.left = torch.where(keeps[:, None], share(after), walk.left)
    walk.tried = torch.where(keeps, 0, walk.tried + refuses.long())
    walk.depth = walk.depth + keeps.long()
    walk.node = torch.where(keeps, node, walk.node)


def put_trees_in_place(drawn: list[int], logits: Tensor, draws: Sequence[RejectionDraw]) -> dict[int, int]:
    """Judge trees by rejection and write the tokens into `drawn`; how many drafts were kept, by `first`."""
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
