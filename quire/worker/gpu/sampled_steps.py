"""Runs the sampling kernels for the rows of a step that ask for more than a temperature, from captured graphs.

A graph serves a number of rows and a set of wishes (`Wants`): few kernels each, captured when first asked for. What the
kernels need beside the logits is staged in one copy; a replayed step of the same rows, each a position further, finds
it there already, unless masks or bans change from token to token. Memory for changed logits and for token counts is
allocated when somebody asks for such; graphs that knew the old places are captured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import sampled_row
from quire.kernels.sampled_row import Wants
from quire.sampling.logprobs import PackedLogprobs
from quire.sampling.sending import send
from quire.worker.gpu.batches import aligned, ladder, rung_for
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.sampled_stage import RepeatedStage, RowSettings, SampledRows, SampledStage
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import DeviceTable

AT_ONCE = 256
"""Rows of one pass: a row of changed logits is 4 bytes times the vocabulary."""
_LOGPROBS, _PENALTIES = int(Wants.LOGPROBS), int(Wants.PENALTIES)
_TOP_BOTH = Wants.DRAW | Wants.TOP_K | Wants.TOP_P
_WARM = (_TOP_BOTH, Wants.DRAW | Wants.TOP_P, Wants.DRAW | Wants.PENALTIES, _TOP_BOTH | Wants.PENALTIES, Wants.LOGPROBS)
"""What most requests ask for: compiled before anybody waits."""


class TokenCounts:
    """Which row of the counts a sequence has, and up to which position its tokens are counted there."""

    def __init__(self, num_rows: int) -> None:
        """`num_rows`: of the table."""
        self.size = 0
        self._slots = np.full(num_rows, -1, np.int32)
        """By row of the table; a row keeps its own for good."""
        self._ages = np.zeros(num_rows, np.int64)
        """Of the sequence that was counted; 0: none is."""
        self._counted = np.zeros(num_rows, np.int32)

    def place(self, rows: SampledRows, table: DeviceTable) -> list[int]:
        """Fill in `slots` and `counted` where there are penalties; returns the slots that must be emptied first."""
        penalised = table.bits(rows.owners) & _PENALTIES != 0
        mine = rows.owners[penalised]
        if not len(mine):
            return []
        for row in mine[self._slots[mine] < 0].tolist():
            self._slots[row] = self.size
            self.size += 1
        ages = table.ages(mine)
        fresh = ages != self._ages[mine]
        rows.slots, rows.counted = np.full(len(rows), -1, np.int32), np.zeros(len(rows), np.int32)
        rows.slots[penalised] = self._slots[mine]
        rows.counted[penalised] = np.where(fresh, 0, self._counted[mine])
        self._ages[mine], self._counted[mine] = ages, rows.positions[penalised]
        return self._slots[mine[fresh]].tolist()

    def advance(self, rows: SampledRows) -> None:
        """The rows of the step before are counted up to their new positions."""
        self._counted[rows.owners] = rows.positions

    def forget(self, rows: SampledRows) -> None:
        """Forget these counts, since the pass that counted failed: count again from the start."""
        self._ages[rows.owners] = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """What the last step has left on the device: its rows, one position further, for the next slot of the ring."""

    settings: list[RowSettings]
    places: np.ndarray
    positions: np.ndarray
    slot: int
    key: tuple[int, int]

    def serves(self, rows: SampledRows, settings: list[RowSettings], slot: int) -> bool:
        """`settings` is the same list for the same sequences in the same order."""
        return (settings is self.settings and slot == self.slot and not rows.masks
                and np.array_equal(rows.positions, self.positions) and np.array_equal(rows.places, self.places))


class SampledSteps:
    """Rows in, tokens into the table and into a ring of the last steps' draws."""

    def __init__(
        self, kernels: ModuleType, table: DeviceTable, logits: Tensor, drawn: Tensor, max_rows: int, pool: Any = None
    ) -> None:
        """`logits`: where steps of fixed shapes leave them. `pool`: of other graphs; None: nothing is captured."""
        self._kernels = kernels
        self._table = table
        self._logits = logits
        self._drawn = drawn
        self._device = logits.device
        self._vocab = logits.shape[1]
        self._most = min(max_rows, AT_ONCE)
        self._rungs = ladder(self._most)
        self._pool = pool
        self._graphs: GraphCache | None = None
        self._scratch: Any = None
        self._counts = TokenCounts(table.num_rows)
        self._stage = RepeatedStage(self._vocab)
        self._last = np.zeros(0, np.int32), np.zeros(0, np.int64)
        """Rows and ages of the step before."""
        self._settings: list[RowSettings] = []
        self._staged: _Staged | None = None
        self._positions: Tensor | None = None
        """Of the step that is drawn, where the device alone knows them."""
        self._step: Any = None

    # ---- memory

    def _allocate(self) -> None:
        """What every pass needs; changed logits and counts come when asked for."""
        empty = torch.empty(0, self._vocab, device=self._device)
        words = sampled_row.HEAD + (self._most + 1) * sampled_row.WORDS
        report = torch.zeros(*self._drawn.shape[:2], sampled_row.REPORT_WORDS, dtype=torch.int32, device=self._device)
        self._scratch = self._kernels.SampleScratch.allocate(self._most, self._vocab, self._device)
        self._step = self._kernels.SampledStep(
            torch.zeros(words, dtype=torch.int32, device=self._device), self._logits, self._table.tokens, self._drawn,
            report, empty, empty.to(torch.int32))
        self._forget()

    def _make_room(self, words: int, rows: int, wants: Wants, fresh: Sequence[int]) -> None:
        if self._step is None:
            self._allocate()
        step = self._step
        before = (step.stage, step.edited, step.counts)
        if step.stage.shape[0] < words:
            step.stage = torch.zeros(2 * words, dtype=torch.int32, device=self._device)
        if wants.edits and step.edited.shape[0] < rows:
            step.edited = step.edited[:0]
            step.edited = torch.empty(rows, self._vocab, device=self._device)
        # `fresh` may be of rows of a later pass, which has penalties where this one has none.
        if (wants & Wants.PENALTIES or fresh) and step.counts.shape[0] < self._counts.size:
            size = max(self._counts.size, min(2 * step.counts.shape[0], self._table.num_rows), min(16, self._most))
            counts = torch.zeros(size, self._vocab, dtype=torch.int32, device=self._device)
            counts[: step.counts.shape[0]] = step.counts
            step.counts = counts
        if any(new is not old for new, old in zip((step.stage, step.edited, step.counts), before, strict=True)):
            self._forget()
        if fresh:
            step.counts.index_fill_(0, send(list(fresh), torch.int64, self._device), 0)

    def _forget(self) -> None:
        """Graphs hold the addresses they were captured with: drop them."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None if self._pool is None else GraphCache(self._device, self._launch, self._pool)

    # ---- passes

    def prepare(self) -> None:
        """Compile what most requests ask for."""
        for wants in _WARM:
            self._make_room(0, 1, wants, ())
            self._send(SampledStage.padding(self._vocab).words(1, 0))
            self._launch((1, int(wants)), False)

    def draw(self, logits: Tensor, rows: SampledRows, slot: int, positions: Tensor | None = None
             ) -> PackedLogprobs | None:
        """Draw for the rows from their places of the logits, into `slot` of the ring; returns what they report.
        `positions`: by place, of the tokens that are followed, where the device alone knows them."""
        settings = self._settings_of(rows.owners)
        staged, self._staged = self._staged, None
        try:
            graphs = self._graphs_for(logits)
            self._positions = positions
            if positions is None and graphs is not None and staged is not None and staged.serves(rows, settings, slot):
                self._counts.advance(rows)
                self._replay(graphs, staged.key, rows, settings, slot)
            else:
                self._draw_staged(logits, rows, settings, slot)
        except BaseException:
            self._counts.forget(rows)
            raise
        asking = np.flatnonzero(self._table.bits(rows.owners) & _LOGPROBS)
        if not len(asking):
            return None
        places = rows.places[asking].tolist()
        counts = [settings[index].logprobs for index in asking.tolist()]
        return PackedLogprobs(places, counts, self._step.report[slot, : max(places) + 1], sampled_row.TOP)

    def _draw_staged(self, logits: Tensor, rows: SampledRows, settings: list[RowSettings], slot: int) -> None:
        fresh = self._counts.place(rows, self._table)
        if len(rows) <= AT_ONCE:
            self._pass(logits, rows, settings, slot, fresh)
            return
        for at in range(0, len(rows), AT_ONCE):
            some = slice(at, at + AT_ONCE)
            self._pass(logits, rows.part(some), settings[some], slot, fresh)
            fresh = []
        self._staged = None

    def _graphs_for(self, logits: Tensor) -> GraphCache | None:
        """Graphs read the logits of decode steps only."""
        return self._graphs if logits.data_ptr() == self._logits.data_ptr() else None

    def _replay(self, graphs: GraphCache, key: tuple[int, int], rows: SampledRows, settings: list[RowSettings],
                slot: int) -> None:
        graphs.run(key)
        if not self._stage.changing and self._positions is None:
            self._staged = _Staged(settings, rows.places, rows.positions + 1, (slot + 1) % len(self._drawn), key)

    def _settings_of(self, owners: np.ndarray) -> list[RowSettings]:
        """Of every row; most steps have the rows of the step before."""
        ages = self._table.ages(owners)
        known, then = self._last
        if not (np.array_equal(owners, known) and np.array_equal(ages, then)):
            self._settings = [self._table.info(row).settings for row in owners.tolist()]
            self._last = owners, ages
        return self._settings

    def _pass(self, logits: Tensor, rows: SampledRows, settings: list[RowSettings], slot: int,
              fresh: Sequence[int]) -> None:
        rung = rung_for(self._rungs, len(rows))
        words, wants = self._stage.words(rows, settings, rung, slot)
        self._make_room(aligned(len(words)), rung, wants, fresh)
        key = (rung, int(wants))
        graphs = self._graphs_for(logits)
        if graphs is None:
            self._send(words)
            self._number(len(rows))
            self._step.logits = logits
            try:
                self._launch(key, False)
            finally:
                self._step.logits = self._logits
            return
        # Captured over padding, since the run before a capture would count tokens twice.
        if not graphs.holds(key):
            self._send(SampledStage.padding(self._vocab).words(rung, slot))
            graphs.capture([key])
        self._send(words)
        self._number(len(rows))
        self._replay(graphs, key, rows, settings, slot)

    def _send(self, words: np.ndarray) -> None:
        stage = Stage()
        stage.add("words", words)
        stage.send(self._device, self._step.stage)

    def _number(self, num_rows: int) -> None:
        """The positions of rows that are staged, where the device alone knows them."""
        if self._positions is not None:
            staged = self._step.stage[sampled_row.HEAD : sampled_row.HEAD + num_rows * sampled_row.WORDS]
            mine = staged.view(num_rows, sampled_row.WORDS)
            mine[:, sampled_row.POSITION] = self._positions[mine[:, sampled_row.PLACE].long()] + 1

    def _launch(self, key: tuple[int, int], _: bool) -> None:
        rows, wants = key
        self._kernels.sample_rows(self._step, rows, Wants(wants), self._scratch)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = self._step = self._scratch = self._pool = None
