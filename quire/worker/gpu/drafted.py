"""The drafts of one step: how many each entry of its plan has, and their tokens, on the device or copied off it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.growth import NO_NODE
from quire.sampling.sending import send, send_tensor
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.speculation.tree import Parents
from quire.worker.gpu.table import DeviceTable

_FEW = 4
"""Chains that are read one by one: for each that costs the host less than sending places does for all."""


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
    """Of the drafts of every entry, where some are trees that came with the plan."""
    grown_depths: list[int] = field(default_factory=list)
    """Of every entry, where some are trees that the device has grown: how deep its tree may be; 0: it has a chain."""
    grown_parents: Tensor | None = None
    """int32, as `tokens`: of the drafts of such trees. Where there are fewer nodes the token is -1."""
    came_with_plan: set[int] = field(default_factory=set)
    """Entries beside those that a model drafts for, whose drafts nobody has drawn: of lookups, under a grammar."""
    refused: set[int] = field(default_factory=set)
    """Entries for which there are none and never will be: what the model reads of their text is missing."""

    @classmethod
    def known(cls, entries: Sequence[PlanEntry]) -> Drafted:
        """Drafts that came with the plan; they stay on the host until the device needs them."""
        values = [token for entry in entries for token in entry.drafts]
        parents = [entry.parents for entry in entries] if any(entry.parents for entry in entries) else []
        return cls([len(entry.drafts) for entry in entries], _starts(entries), torch.tensor(values, dtype=torch.int32),
                   parents=parents)

    @classmethod
    def read(cls, entries: Sequence[PlanEntry], counts: list[int], table: DeviceTable) -> Drafted:
        """Drafts that lie in the table: a model has drawn `counts` of them, others came with the plan."""
        known = {i for i, entry in enumerate(entries) if entry.drafts}
        if known:
            counts = [len(entry.drafts) or count for entry, count in zip(entries, counts, strict=True)]
        found = cls(counts, _starts(entries), table.tokens[:0, 0], came_with_plan=known)
        chains = [(row, first, count) for (row, first), count in zip(found.starts, counts, strict=True) if count]
        if 0 < len(chains) <= _FEW:
            found.tokens = torch.cat([table.tokens[row, first : first + count] for row, first, count in chains])
        else:
            found.tokens = table.arena[found._places(table, range(len(counts)))]
        return found

    @classmethod
    def grown(cls, entries: Sequence[PlanEntry], table: DeviceTable, parents: Tensor, chains: Drafted) -> Drafted:
        """The same, some of them trees. `parents`: of the rows of the step, in which drafts follow the token before
        them; of chains they say nothing. `chains`: what was known before trees had grown."""
        counts = [entry.num_drafts for entry in entries]
        found = cls.read(entries, counts, table)
        rows = [row for row, fresh in enumerate(place for count in counts for place in range(1 + count)) if fresh]
        mine = parents[send(rows, torch.int64, parents.device)]
        found.grown_depths = [entry.draft_depth for entry in entries]
        deep = [entry.draft_depth > 0 for entry in entries for _ in range(entry.num_drafts)]
        missing = send(deep, torch.bool, parents.device) & (mine == NO_NODE)
        found.tokens, found.grown_parents = torch.where(missing, -1, found.tokens), mine
        found.passes, found.refused, found.came_with_plan = chains.passes, chains.refused, chains.came_with_plan
        return found

    def is_tree(self, entry: int) -> bool:
        return bool(self.parents_of(entry)) or bool(self.grown_depths and self.grown_depths[entry])

    def parents_of(self, entry: int) -> Parents:
        """Of the drafts of one entry, if they are a tree that came with the plan."""
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
        return [tuple(token for token in mine if token >= 0) for mine in self._split(self.tokens)]

    def trees_by_entry(self) -> list[tuple[tuple[int, ...], Parents]]:
        """The same with the parents of drafts that are trees."""
        found = list(zip(self.by_entry(), (self.parents_of(i) for i in range(len(self.counts))), strict=True))
        if self.grown_parents is None:
            return found
        for i, parents in enumerate(self._split(self.grown_parents)):
            tokens = found[i][0]
            if self.grown_depths[i] and parents[: len(tokens)] != list(range(-1, len(tokens) - 1)):
                found[i] = tokens, tuple(parents[: len(tokens)])
        return found

    def _split(self, tensor: Tensor) -> list[list[int]]:
        """By entry."""
        values, found, first = tensor.tolist(), [], 0
        for count in self.counts:
            found.append(values[first : first + count])
            first += count
        return found


class DraftSource(Protocol):
    """Who proposes tokens on the device."""

    def follow(self, plan: StepPlan) -> None: ...

    def propose(self, entries: Sequence[PlanEntry], table: DeviceTable) -> tuple[list[PlanEntry], Drafted]:
        """The entries with the number of drafts each gets, and the drafts; trees may still have to be staged."""
        ...

    def tell(self, asked: Sequence[PlanEntry], filled: Sequence[PlanEntry], drafted: Drafted | None) -> None:
        """What has become of a proposal, once its trees have grown too; None: it failed. For those who wait for it."""
        ...

    def draft_on(self, drafted: Drafted) -> bool: ...


def _starts(entries: Sequence[PlanEntry]) -> list[tuple[int, int]]:
    return [(entry.row, entry.start + 1) for entry in entries]
