"""The verifiers: which drafts the target accepts, and which token of its own follows them.

Coupled (also for greedy): the target samples at every place with the noise of that position, and drafts are accepted as
long as they equal the samples. So the tokens are those of plain decoding.

Rejection: a draft x sampled from q is accepted with probability min(1, p(x)/q(x)). The first rejected one is replaced
by a sample from max(0, p - q); after the last accepted one a token is sampled from p. So tokens are distributed as p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.philox import Purpose, uniforms
from quire.sampling.sampler import draw_weights
from quire.sampling.sending import send
from quire.speculation.tree import Parents, parent_of

_AT_ONCE = 16
"""Sequences verified together, which bounds memory: weights are a vocabulary wide at every place."""
_PURPOSES = 256
"""Purpose numbers reserved for each sibling."""


def rows_along(row: SamplingRow, drafts: Sequence[int], masks: bytes = b"", parents: Parents = ()
               ) -> list[SamplingRow]:
    """Sampling state before the drafts and after each of them; `masks` are a grammar's, one for each of these."""
    rows = [row]
    for node, draft in enumerate(drafts):
        rows.append(rows[1 + parent_of(parents, node)].ahead((draft,)))
    size = len(masks) // len(rows)
    for place, each in enumerate(rows):
        each.mask = masks[place * size : (place + 1) * size]
    return rows


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """Keys of the sampling noise of a batch: int64 tensors [B]. `position` is that of the first draft."""

    seed: Tensor
    seq_index: Tensor
    position: Tensor

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], device: torch.device | str = "cpu") -> NoiseKeys:
        numbers = [(row.seed, row.seq_index, row.position) for row in rows]
        columns = send(numbers, torch.int64, torch.device(device))
        return cls(columns[:, 0], columns[:, 1], columns[:, 2])

    def noise(self, purpose: Purpose, ahead: int | Tensor = 0, sibling: int | Tensor = 0) -> Tensor:
        """Numbers in [0, 1) for one purpose, `ahead` places further; each sibling at a place has its own."""
        return uniforms(self.seed, self.seq_index, self.position + ahead, int(purpose) + _PURPOSES * sibling)


def judge_by_rejection(drafts: Tensor, target: Tensor, proposal: Tensor | None, keys: NoiseKeys
                       ) -> tuple[Tensor, Tensor]:
    """(number of drafts accepted [B], the token after them [B]) of a batch.

    Rows of `drafts` [B, K] with fewer drafts are padded with -1. `target` [B, K + 1, V] are weights proportional to p
    at every place, `proposal` [B, K, V] those of q at every draft; None: q is 1 at each draft.
    """
    num_drafts = (drafts >= 0).sum(1)
    kept = torch.zeros_like(num_drafts)
    for place in range(drafts.shape[1]):
        draft = drafts[:, place : place + 1].clamp(min=0)
        p = share(target[:, place]).gather(1, draft).squeeze(1)
        q = 1.0 if proposal is None else share(proposal[:, place]).gather(1, draft).squeeze(1)
        keeps = keys.noise(Purpose.ACCEPT, place) * q < p
        kept += keeps & (kept == place) & (place < num_drafts)
    rows = torch.arange(len(drafts), device=drafts.device)
    refused = kept < num_drafts
    left = p_at = share(target[rows, kept])
    # On a CPU checking first is cheaper than the sums; on a GPU it would synchronise.
    if drafts.device.type != "cpu" or bool(refused.any()):
        at = kept.clamp(max=drafts.shape[1] - 1)
        rest = (p_at - _proposed(drafts, proposal, rows, at, p_at)).clamp_(min=0.0)
        # Where p equals q nothing is left, and only rounding can have rejected a draft.
        left = torch.where((refused & (rest.sum(1) > 0.0))[:, None], rest, p_at)
    noise = torch.where(refused, keys.noise(Purpose.RESAMPLE, kept), keys.noise(Purpose.SAMPLE, kept))
    return kept, pick(left, noise)


@dataclass(slots=True)
class RejectionDraw:
    """One sequence's drafts to be verified: rows of logits from `first` on, and sampling state for each."""

    first: int
    drafts: Sequence[int]
    rows: Sequence[SamplingRow]
    proposal: Tensor | None
    """Weights [drafts, V] that the drafts were sampled with; None: q is 1 at each draft."""
    parents: Parents = ()
    """Parents of a tree's nodes; empty: a chain."""


def put_in_place(drawn: list[int], logits: Tensor, draws: Sequence[RejectionDraw]) -> dict[int, int]:
    """Verify by rejection and write the tokens into `drawn`; returns how many drafts were accepted, by `first`."""
    kept_by_first: dict[int, int] = {}
    for at in range(0, len(draws), _AT_ONCE):
        part = draws[at : at + _AT_ONCE]
        most, width = max(len(draw.drafts) for draw in part), logits.shape[1]
        drafts = torch.full((len(part), most), -1, dtype=torch.int64)
        target = torch.zeros(len(part), most + 1, width, dtype=torch.int64)
        proposal = None if part[0].proposal is None else torch.zeros(len(part), most, width, dtype=torch.int64)
        for i, draw in enumerate(part):
            count = len(draw.drafts)
            drafts[i, :count] = torch.tensor(draw.drafts)
            own = logits[draw.first : draw.first + count + 1]
            target[i, : count + 1] = draw_weights(own, SamplingBatch.build(draw.rows, width))
            if proposal is not None and draw.proposal is not None:
                proposal[i, :count] = draw.proposal
        judged = judge_by_rejection(drafts, target, proposal, NoiseKeys.of([draw.rows[0] for draw in part]))
        for draw, kept, token in zip(part, judged[0].tolist(), judged[1].tolist(), strict=True):
            drawn[draw.first : draw.first + kept + 1] = [*draw.drafts[:kept], token]
            kept_by_first[draw.first] = kept
    return kept_by_first


def _proposed(drafts: Tensor, proposal: Tensor | None, rows: Tensor, at: Tensor, like: Tensor) -> Tensor:
    """q at place `at` of each row."""
    if proposal is not None:
        return share(proposal[rows, at])
    return torch.zeros_like(like).scatter_(1, drafts[rows, at].clamp(min=0)[:, None], 1.0)


def share(weights: Tensor) -> Tensor:
    """Weights as probabilities; all 0 where nothing can be sampled, which the row's status reports."""
    weights = weights.double()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1.0)


def pick(weights: Tensor, noise: Tensor) -> Tensor:
    """In each row the first token at which the cumulative weight exceeds `noise` times the total."""
    running = weights.double().cumsum(-1)
    place = torch.searchsorted(running, running[:, -1:] * noise[:, None], right=True).squeeze(1)
    # Rounding may take the product to the total itself: then take the last token with any weight.
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(1)
    return torch.minimum(place, last)
