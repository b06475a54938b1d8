"""Drafts of a model on the device: its steps before the target's, in the same stream, none of them waited for.

The draft model has a runner of its own over the same request table. Each of its steps writes the tokens it draws into
the rows, where its next step and then the target's find them; the target's draws overwrite them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from quire.errors import InvariantError
from quire.models.decoder import Decoder
from quire.sampling.philox import Purpose
from quire.sampling.sampler import draw_weights
from quire.sampling.sending import send
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.speculation.verify import NoiseKeys, pick
from quire.worker.draft_models import DraftProgress, kept_layers
from quire.worker.drafter import MOST_AT_ONCE
from quire.worker.gpu.batches import end_of, is_decode
from quire.worker.gpu.drafted import Drafted, DraftPass
from quire.worker.gpu.draws import DrawnStep, SpecialDraws
from quire.worker.gpu.runner import DeviceRunner
from quire.worker.gpu.sampled_stage import SampledRow
from quire.worker.gpu.sampling import special_batch
from quire.worker.gpu.table import DeviceTable


def without_layers(decoder: Decoder, skipped: Sequence[int] | None) -> tuple[Decoder, list[int]]:
    """The same decoder, with some of its layers only, and which those are."""
    kept = kept_layers(decoder.spec.num_layers, skipped)
    thin = copy.copy(decoder)
    thin.layers = [decoder.layers[index] for index in kept]
    thin.spec = replace(decoder.spec, layers=tuple(decoder.spec.layers[index] for index in kept))
    return thin, kept


class DraftRunner(DeviceRunner):
    """Steps of a draft model: a decode step leaves its buffers ready for the next token of the same rows."""

    def __init__(self, *args: Any, rejection: bool = False, **options: Any) -> None:
        """`rejection`: tokens are drawn with noise of their own, and their weights kept (`KeptDraws`)."""
        super().__init__(*args, **options, advance=True)
        self._kept = KeptDraws(self._table) if rejection else None
        if self._kept is not None:
            self.draws = self._kept
        self._staged: list[tuple[int, int]] = []
        """Rows and positions that lie in the decode buffers."""

    @property
    def passes(self) -> list[DraftPass]:
        """How this step's drafts were drawn, under rejection."""
        return [] if self._kept is None else self._kept.passes

    def begin(self) -> None:
        """A new step's drafts."""
        if self._kept is not None:
            self._kept.passes = []
        self._staged = []

    def launch(self, entries: list[PlanEntry]) -> None:
        """As any step; where it is the last one's rows, each a token further, nothing needs to be staged."""
        places = [(entry.row, entry.start) for entry in entries]
        if is_decode(entries) and places == self._staged:
            self.launch_staged(entries, 0, None)
        else:
            super().launch(entries)
        self._staged = [(row, start + 1) for row, start in places] if is_decode(entries) else []


class KeptDraws(SpecialDraws):
    """Draws of a draft model under rejection: with noise of their own, and the weights of every draw are kept."""

    def __init__(self, table: DeviceTable) -> None:
        super().__init__(table, rejection=False)
        self.passes: list[DraftPass] = []

    def draw(self, step: DrawnStep) -> None:
        table, entries = self._table, step.entries
        rows = [SampledRow(place, entries[i].row, end_of(entries[i])) for place, i in enumerate(step.drawing)]
        picked, batch = special_batch(step.logits, rows, table)
        weights = draw_weights(picked, batch)
        # A row that cannot draw proposes token 0 with certainty.
        weights[:, 0] += weights.sum(1) == 0
        keys = [_state_at(table, row) for row in rows]
        tokens = pick(weights, NoiseKeys.of(keys, weights.device).noise(Purpose.DRAFT))
        places = [row.row * table.max_model_len + min(row.position, table.max_model_len - 1) for row in rows]
        where = send(places, torch.int64, weights.device)
        table.arena[where] = tokens.to(torch.int32)
        self.passes.append(DraftPass(weights, {row.row: place for place, row in enumerate(rows)}))


def _state_at(table: DeviceTable, row: SampledRow):  # type: ignore[no-untyped-def]
    state = table.info(row.row).state.ahead(())
    state.position = row.position
    return state


class Growth(Protocol):
    """Grows trees with the passes of the same runner."""

    span: int
    """Tokens of one sequence that the last pass before may have."""

    def nodes_of(self, entry: PlanEntry) -> int: ...

    def grow(self, entries: Sequence[PlanEntry]) -> None: ...


class Ahead(Protocol):
    """Launches drafts before the next plan asks for them."""

    def launch(self, drafted: Drafted) -> bool: ...

    def keep(self, plan: StepPlan) -> None: ...

    def take(self, entry: PlanEntry, start: int) -> int: ...


class DeviceDrafter:
    """Draws up to k drafts for every row that asks for some; how far the model is behind is tracked on the host."""

    def __init__(self, runner: DraftRunner, progress: DraftProgress | None, most_tokens: int,
                 keeps_drafts: bool = True, trees: Growth | None = None, ahead: Ahead | None = None) -> None:
        """`keeps_drafts`: what it computed for drafts holds if they are accepted. Not so for a head, which computes
        them from its own guesses at hidden states. `trees`: grows those that entries ask for. `ahead`: drafts for the
        next step before it is planned."""
        self.runner = runner
        self._progress = progress
        """Of a model with KV of its own; None: it reads the target's."""
        self._most_tokens = most_tokens
        self._keeps_drafts = keeps_drafts
        self._trees = trees
        self._ahead = ahead

    def draft_on(self, drafted: Drafted) -> bool:
        """Drafts for the step after the one that was launched last, whose drafts these are."""
        return self._ahead is not None and self._ahead.launch(drafted)

    def tell(self, asked: Sequence[PlanEntry], filled: Sequence[PlanEntry], drafted: Drafted | None) -> None:
        """Nobody waits for it."""

    def follow(self, plan: StepPlan) -> None:
        """Take note of what a plan does to the rows and blocks, before it runs."""
        if self._ahead is not None:
            self._ahead.keep(plan)
        progress = self._progress
        if progress is None:
            return
        if plan.copies:
            progress.copied(plan.copies)
        if plan.transfers:
            progress.moved(plan.transfers)
        for start in plan.starts:
            progress.restart(start.row)
        if plan.head_rests and progress.marked(plan.decoding):
            return
        # What was drafted beyond this was refused: a sequence goes on only when its drafts were judged.
        progress.all_kept(plan.entries)
        progress.written(plan.entries, plan.head_rests)

    def propose(self, entries: Sequence[PlanEntry], table: DeviceTable) -> tuple[list[PlanEntry], Drafted]:
        """The entries with the number of drafts each gets (0 while the model is behind), and the drafts. Those of trees
        are not among these yet: they have grown, and whoever stages the target's step gets them."""
        refused = self._refused(entries)
        if refused:
            entries = [replace(entry, device_drafts=0, draft_depth=0, num_tokens=1) if i in refused else entry
                       for i, entry in enumerate(entries)]
        counts = [0] * len(entries)
        there = [1] * len(entries)
        """Drafts that each has after the first pass."""
        first: list[PlanEntry] = []
        left = self._most_tokens
        for i, entry in enumerate(entries):
            if not entry.device_drafts or entry.draft_depth:
                continue
            start, wanted = (entry.start, 1) if self._progress is None else self._progress.catch_up(entry)
            ahead = 0 if self._ahead is None else self._ahead.take(entry, start)
            if ahead:
                counts[i], there[i] = entry.device_drafts, ahead
                self._computed(PlanEntry(entry.row, start, wanted, sample=True))
                continue
            count = min(wanted, MOST_AT_ONCE, left)
            if count > 0:
                left -= count
                first.append(PlanEntry(entry.row, start, count, sample=count == wanted))
                counts[i] = entry.device_drafts if count == wanted else 0
        self.runner.begin()
        self._pass(first, keeps=True)
        for place in range(1, max(counts, default=0)):
            self._pass([PlanEntry(entry.row, entry.start + place, 1, sample=True)
                        for entry, count, known in zip(entries, counts, there, strict=True) if count > place >= known],
                       self._keeps_drafts)
        filled = [replace(entry, device_drafts=count, num_tokens=1 + count)
                  if entry.device_drafts and not entry.draft_depth else entry
                  for entry, count in zip(entries, counts, strict=True)]
        drafted = Drafted.read(entries, counts, table)
        drafted.passes, drafted.refused = self.runner.passes, refused
        if any(entry.draft_depth for entry in entries):
            filled = self._grown(filled)
        return filled, drafted

    def _refused(self, entries: Sequence[PlanEntry]) -> set[int]:
        progress = self._progress
        if progress is None:
            return set()
        return {i for i, entry in enumerate(entries) if entry.device_drafts and progress.refuses(entry)}

    def _grown(self, entries: Sequence[PlanEntry]) -> list[PlanEntry]:
        """Trees for the entries that ask for some, and none while the model is behind."""
        if self._trees is None:
            raise InvariantError("a tree was asked of who drafts chains")
        span, left = self._trees.span, self._most_tokens
        reading: list[PlanEntry] = []
        last: list[PlanEntry] = []
        filled: list[PlanEntry] = []
        growing: list[PlanEntry] = []
        for entry in entries:
            if not entry.draft_depth:
                filled.append(entry)
                continue
            start, wanted = (entry.start, 1) if self._progress is None else self._progress.catch_up(entry)
            # A text that it has not read takes a pass of its own, so that the last tokens of all fit into one step.
            count = min(wanted - 1 if wanted > span else 0, MOST_AT_ONCE, left)
            left -= count
            if count > 0:
                reading.append(PlanEntry(entry.row, start, count, sample=False))
            if wanted - count > span:
                filled.append(replace(entry, device_drafts=0, draft_depth=0, num_tokens=1))
                continue
            last.append(PlanEntry(entry.row, start + count, wanted - count, sample=True))
            nodes = self._trees.nodes_of(entry)
            growing.append(entry)
            filled.append(replace(entry, device_drafts=nodes, num_tokens=1 + nodes))
        # What was drawn for chains is judged by its weights; nodes of trees are chosen.
        self.runner.begin()
        self._pass(reading, keeps=True)
        self._pass(last, keeps=True)
        if growing:
            self._trees.grow(growing)
        self.runner.begin()
        return filled

    def _pass(self, entries: list[PlanEntry], keeps: bool) -> None:
        if entries:
            self.runner.launch(entries)
        if keeps:
            for entry in entries:
                self._computed(entry)

    def _computed(self, entry: PlanEntry) -> None:
        if self._progress is not None:
            self._progress.computed(entry)
