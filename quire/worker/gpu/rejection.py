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
from quire.speculation.verify import NoiseKeys, judge_by_rejection
from quire.worker.gpu.backend import host_sampling
from quire.worker.gpu.drafted import Drafted
from quire.worker.gpu.sampled_stage import SampledRow
from quire.worker.gpu.sampling import special_batch
from quire.worker.gpu.table import DeviceTable

_AT_ONCE = 8
"""Sequences judged together: their weights are a vocabulary wide at every place."""


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
    for at in range(0, len(judged), _AT_ONCE):
        part = _Part(judged[at : at + _AT_ONCE], drafted, table, logits)
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
        self.picked, self.batch = special_batch(logits, self.rows, table)
        firsts = [sum(1 + count for count in self.counts[:i]) for i in range(len(entries))]
        self.index = [[first + (j if j <= count else 0) for j in range(self.most + 1)]
                      for first, count in zip(firsts, self.counts, strict=True)]

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return send(values, torch.int64, self.device)

    def judge(self, slot: Tensor) -> tuple[list[int], SampledLogprobs] | None:
        target = draw_weights(self.picked, self.batch)[self._tensor(self.index)]
        drafts = self._drafts()
        kept, token = judge_by_rejection(drafts, target, self._proposal(), self._keys())
        place = torch.arange(self.most + 1, device=self.device)
        padded = torch.cat((drafts, drafts[:, :1]), 1)
        values = torch.where(place < kept[:, None], padded, token[:, None])
        late = (place > kept[:, None]).long()
        real = self._tensor([i * (self.most + 1) + j for i, count in enumerate(self.counts) for j in range(count + 1)])
        values, late = values.flatten()[real], late.flatten()[real]
        where = self._tensor([row.place for row in self.rows])
        status = slot[where, 1].long()
        status = torch.where(late > 0, NOT_FINITE, status)
        slot[where] = torch.stack((values, status), 1).to(torch.int32)
        end = self.table.max_model_len
        tokens = self._tensor([row.row * end + min(row.position, end - 1) for row in self.rows])
        self.table.arena[tokens] = values.to(torch.int32)
        return self._logprobs(values)

    def _drafts(self) -> Tensor:
        """[entries, most]; -1 after the last of an entry."""
        before = [sum(self.drafted.counts[: entry.index]) for entry in self.entries]
        places = [[first + j if j < count else -1 for j in range(self.most)]
                  for first, count in zip(before, self.counts, strict=True)]
        where = self._tensor(places)
        tokens = self.drafted.tokens
        tokens = send_tensor(tokens, self.device) if tokens.is_cpu else tokens
        return torch.where(where < 0, -1, tokens.long()[where.clamp(min=0)])

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

    def _logprobs(self, tokens: Tensor) -> tuple[list[int], SampledLogprobs] | None:
        found = batch_logprobs(self.picked, tokens, self.batch, host_sampling(self.device))
        return None if found is None else ([self.rows[row].place for row in found.rows], found)
