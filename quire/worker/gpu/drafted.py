"""The drafts of one step: how many each entry of its plan has, and their tokens, on the device or copied off it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quire.sampling.sending import send, send_tensor
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.speculation.tree import Parents
from quire.worker.gpu.table import DeviceTable


@dataclass(slots=True)
class DraftPass:
    """The weights that a draft model drew one token of each of some rows with, for rejection."""

    weights: Tensor
    """int64 [rows, vocabulary]."""
    place: dict[int, int]
    """By row of the table: the row of `weights`."""


@dataclass(slots=True)
class Drafted:
    counts: list[int]
    """Drafts of every entry of the plan."""
    starts: list[tuple[int, int]]
    """Row of the table and position of the first draft, of every entry."""
    tokens: Tensor
    """int32: all drafts, in the order of the entries."""
    passes: list[DraftPass] = field(default_factory=list)
    """Under rejection, for drafts of a model: how the first, second, ... were drawn."""
    parents: list[Parents] = field(default_factory=list)
    """Of the drafts of every entry, where some are trees."""

    @classmethod
    def known(cls, entries: Sequence[PlanEntry]) -> Drafted:
        """Drafts that came with the plan; they stay on the host until the device needs them."""
        values = [token for entry in entries for token in entry.drafts]
        parents = [entry.parents for entry in entries] if any(entry.parents for entry in entries) else []
        return cls([len(entry.drafts) for entry in entries], _starts(entries), torch.tensor(values, dtype=torch.int32),
                   parents=parents)

    @classmethod
    def read(cls, entries: Sequence[PlanEntry], counts: list[int], table: DeviceTable) -> Drafted:
        """Drafts that lie in the table, where a model has drawn them."""
        found = cls(counts, _starts(entries), table.tokens[:0, 0])
        found.tokens = table.arena[found._places(table, range(len(counts)))]
        return found

    def parents_of(self, entry: int) -> Parents:
        """Of the drafts of one entry, if they are a tree."""
        return self.parents[entry] if self.parents else ()

    def _places(self, table: DeviceTable, entries: Sequence[int]) -> Tensor:
        places = [row * table.max_model_len + first + j for i in entries
                  for (row, first) in (self.starts[i],) for j in range(self.counts[i])]
        if not places:
            return torch.empty(0, dtype=torch.int64, device=table.arena.device)
        return send(places, torch.int64, table.arena.device)

    def put_back(self, table: DeviceTable, entries: Sequence[int]) -> None:
        """Write the drafts back into the rows of those `entries` whose draws read the text: another draw overwrote
        them."""
        entries = [i for i in entries if self.counts[i] and table.info(self.starts[i][0]).reads_history]
        if entries:
            ends = [sum(self.counts[: i + 1]) for i in entries]
            chosen = torch.cat([self.tokens[end - self.counts[i] : end] for i, end in zip(entries, ends, strict=True)])
            if chosen.is_cpu:
                chosen = send_tensor(chosen, table.arena.device)
            table.arena[self._places(table, entries)] = chosen

    def by_entry(self) -> list[tuple[int, ...]]:
        """The tokens on the host, for drafts that were copied there."""
        values, found, first = self.tokens.tolist(), [], 0
        for count in self.counts:
            found.append(tuple(values[first : first + count]))
            first += count
        return found


class DraftSource(Protocol):
    """Who proposes tokens on the device."""

    def follow(self, plan: StepPlan) -> None: ...

    def propose(self, entries: Sequence[PlanEntry], table: DeviceTable) -> tuple[list[PlanEntry], Drafted]: ...


def _starts(entries: Sequence[PlanEntry]) -> list[tuple[int, int]]:
    return [(entry.row, entry.start + 1) for entry in entries]
