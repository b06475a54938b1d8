"""Judges drafts by rejection on the device: the same arithmetic and noise as on a CPU, without a look at any result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.batch import SamplingRow
from quire.sampling.logprobs import SampledLogprobs, batch_logprobs
from quire.sampling.sampler import NOT_FINITE, draw_weights
from quire.sampling.sending import send, send_tensor
from quire.speculation.tree import ROOT, depths
from quire.speculation.verify import NoiseKeys, judge_by_rejection
from quire.speculation.verify_tree import judge_tree
from quire.worker.gpu.backend import host_sampling
from quire.worker.gpu.drafted import Drafted
from quire.worker.gpu.sampled_stage import SampledRow
from quire.worker.gpu.sampling import special_batch
from quire.worker.gpu.table import DeviceTable

_AT_ONCE = 8
"""Sequences judged together: their weights are a vocabulary wide at every place."""
_TREES_AT_ONCE = 2
"""The same of those with trees, which have many more places."""


@dataclass(slots=True)
class JudgedEntry:
    """An entry of the plan with drafts: its number there, and the places of its draws among the step's logits."""

    index: int
    rows: list[SampledRow]


def judge_drafts(logits: Tensor, judged: Sequence[JudgedEntry], drafted: Drafted, table: DeviceTable, slot: Tensor
                 ) -> list[tuple[list[int], SampledLogprobs]]:
    """Put what came of the entries into `slot` [places, 2] (token, status) and into the table's rows.

    What follows the first refused draft of an entry gets a status that ends it there. Returns the log-probabilities
    of those that want some, with the places they belong to.
    """
    found = []
    trees = [entry for entry in judged if drafted.is_tree(entry.index)]
    chains = [entry for entry in judged if not drafted.is_tree(entry.index)]
    drawn = [entry for entry in chains if entry.index not in drafted.came_with_plan]
    known = [entry for entry in chains if entry.index in drafted.came_with_plan]
    parts = [kind(some[at : at + _AT_ONCE], drafted, table, logits)
             for kind, some in ((_Part, drawn), (_KnownPart, known))
             for at in range(0, len(some), _AT_ONCE)]
    parts += [_TreePart(trees[at : at + _TREES_AT_ONCE], drafted, table, logits)
              for at in range(0, len(trees), _TREES_AT_ONCE)]
    for part in parts:
        logprobs = part.judge(slot)
        if logprobs is not None:
            found.append(logprobs)
    return found


class _Part:
    """Some entries, each a row [1 + most drafts] of its places; where it has fewer, the rest repeats the first."""

    def __init__(self, entries: Sequence[JudgedEntry], drafted: Drafted, table: DeviceTable, logits: Tensor) -> None:
        self.entries, self.drafted, self.table, self.device = entries, drafted, table, logits.device
        self.counts = [len(entry.rows) - 1 for entry in entries]
        self.most = max(self.counts)
        self.rows = [row for entry in entries for row in entry.rows]
        self._logits = logits
        firsts = [sum(1 + count for count in self.counts[:i]) for i in range(len(entries))]
        self.index = [[first + (j if j <= count else 0) for j in range(self.most + 1)]
                      for first, count in zip(firsts, self.counts, strict=True)]

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return send(values, torch.int64, self.device)

    def judge(self, slot: Tensor) -> tuple[list[int], SampledLogprobs] | None:
        picked, batch = special_batch(self._logits, self.rows, self.table)
        values, late = self._outcome(draw_weights(picked, batch)[self._tensor(self.index)], self._drafts())
        real = self._tensor([i * (self.most + 1) + j for i, count in enumerate(self.counts) for j in range(count + 1)])
        values, late = values.flatten()[real], late.flatten()[real]
        where = self._tensor([row.place for row in self.rows])
        status = slot[where, 1].long()
        status = torch.where(late, NOT_FINITE, status)
        slot[where] = torch.stack((values, status), 1).to(torch.int32)
        self._put_in_rows(values)
        found = batch_logprobs(picked, values, batch, host_sampling(self.device))
        return None if found is None else ([self.rows[row].place for row in found.rows], found)

    def _outcome(self, target: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """[entries, 1 + most]: the tokens at all places, and which places are not reached."""
        kept, token = judge_by_rejection(drafts, target, self._proposal(), self._keys())
        place = torch.arange(self.most + 1, device=self.device)
        padded = torch.cat((drafts, drafts[:, :1]), 1)
        return torch.where(place < kept[:, None], padded, token[:, None]), place > kept[:, None]

    def _put_in_rows(self, values: Tensor) -> None:
        end = self.table.max_model_len
        tokens = self._tensor([row.row * end + min(row.position, end - 1) for row in self.rows])
        self.table.arena[tokens] = values.to(torch.int32)

    def _drafts(self) -> Tensor:
        """[entries, most]; -1 after the last of an entry."""
        return self._of_drafts(self.drafted.tokens)

    def _of_drafts(self, values: Tensor) -> Tensor:
        """The same of any numbers that all drafts have."""
        before = [sum(self.drafted.counts[: entry.index]) for entry in self.entries]
        places = [[first + j if j < count else -1 for j in range(self.most)]
                  for first, count in zip(before, self.counts, strict=True)]
        where = self._tensor(places)
        values = send_tensor(values, self.device) if values.is_cpu else values
        return torch.where(where < 0, -1, values.long()[where.clamp(min=0)])

    def _proposal(self) -> Tensor | None:
        """The weights that a model drew its drafts with; None: somebody was sure of them."""
        passes = self.drafted.passes
        if not passes:
            return None
        owners = [entry.rows[0].row for entry in self.entries]
        return torch.stack([one.weights[self._tensor([one.place.get(owner, 0) for owner in owners])]
                            for one in passes[: self.most]], 1)

    def _keys(self) -> NoiseKeys:
        states: list[SamplingRow] = []
        for entry in self.entries:
            state = self.table.info(entry.rows[0].row).state.ahead(())
            state.position = entry.rows[0].position
            states.append(state)
        return NoiseKeys.of(states, self.device)


class _KnownPart(_Part):
    """Entries whose drafts came with the plan: whoever looked them up was sure."""

    def _proposal(self) -> Tensor | None:
        return None


class _TreePart(_Part):
    """Entries whose drafts are trees: chosen, not drawn. What is kept is written so that who walks along a tree by what
    was drawn goes where the judge went."""

    def _outcome(self, target: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        most, grown = self.most, self.drafted.grown_parents
        if grown is None:
            shapes = [self.drafted.parents_of(entry.index) for entry in self.entries]
            parents = self._tensor([[*shape, *[ROOT] * (most - len(shape))] for shape in shapes])
            deepest = max(max(depths(shape)) for shape in shapes)
        else:
            parents = self._of_drafts(grown)
            deepest = max(self.drafted.grown_depths[entry.index] for entry in self.entries)
        last, _, token = judge_tree(drafts, parents, target, None, self._keys())
        kept = torch.zeros_like(drafts, dtype=torch.bool)
        place = torch.arange(most, device=self.device)
        for _ in range(deepest):
            kept = kept | (place == last[:, None])
            above = parents.gather(1, last.clamp(min=0)[:, None]).squeeze(1)
            last = torch.where(last < 0, last, above)
        # A kept draft is what was drawn at its parent; all others go to a column that is cut off.
        values = token[:, None].repeat(1, most + 2)
        values.scatter_(1, torch.where(kept, parents + 1, most + 1), drafts)
        return values[:, : most + 1], torch.cat((torch.zeros_like(kept[:, :1]), ~kept), 1)

    def _put_in_rows(self, values: Tensor) -> None:
        """Whoever walks along the tree does."""
