"""The request table on the device: one row per running sequence, changed only by the diffs that plans bring.

Tokens, block tables and sampling state are one int32 arena, so that any diff is (place, value) and a step's diffs are
one copy to the device and one scatter. Sampled tokens are written into the rows by the device itself.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.errors import InvariantError
from quire.kernels.sampled_row import Wants
from quire.kernels.step_reference import FIELDS
from quire.sampling.batch import SamplingRow
from quire.sampling.params import SamplingParams
from quire.sampling.philox import signed_seed
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan
from quire.worker.gpu.sampled_stage import RowSettings


@dataclass(slots=True)
class RowInfo:
    """What the host needs to know of a row: nothing in it changes while the sequence runs."""

    params: SamplingParams
    num_prompt: int
    special: bool
    """Needs more than temperature and min_p, or log-probabilities: the drawing kernel alone is not enough."""
    state: SamplingRow
    """Its parameters for the full sampler. Values of drawn tokens are not in it: they are on the device."""
    bad_words: tuple[tuple[int, ...], ...]
    settings: RowSettings
    """The same for the sampling kernels."""
    unreported: RowInfo | None = None
    """The same without log-probabilities, where those are asked for: nobody wants to know them of drafts."""

    @property
    def reads_history(self) -> bool:
        """Draws depend on the text so far."""
        return self.params.penalised or bool(self.bad_words)


class DeviceTable:
    """Rows named by the scheduler. Token t of row r is tokens[r, t]; its KV is in block tables[g][r, t //
    size]."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._vocab_size = vocab_size
        self._width = -(-max_model_len // block_size)
        self._state_base = num_rows * max_model_len
        self._table_base = [self._state_base + num_rows * (FIELDS + g * self._width) for g in range(num_groups)]
        size = self._state_base + num_rows * (FIELDS + num_groups * self._width)
        if size >= 1 << 31:
            raise InvariantError("the request table would have more than 2**31 entries: lower max_num_seqs")
        self.arena = torch.zeros(size, dtype=torch.int32, device=device)
        self.tokens = self.arena[: self._state_base].view(num_rows, max_model_len)
        self.state = self.arena[self._state_base : self._state_base + num_rows * FIELDS].view(num_rows, FIELDS)
        self.tables = tuple(
            self.arena[base : base + num_rows * self._width].view(num_rows, self._width) for base in self._table_base
        )
        self.host_tables = [np.zeros((num_rows, self._width), np.int32) for _ in range(num_groups)]
        """The block tables as the last plan left them, for whoever must know what a step touches."""
        self._num_blocks = np.zeros((num_groups, num_rows), np.int64)
        """Of every row, as the last plan left it: what lies behind them in its block table is of others."""
        self._info: list[RowInfo | None] = [None] * num_rows
        self._bits = np.zeros(num_rows, np.int32)
        self._ages = np.zeros(num_rows, np.int64)
        self._places: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._learned: list[tuple[int, Sequence[int]]] = []

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """What was drawn for a row on a later stage, the first token for `position`. A row that is empty is left
        alone."""
        if tokens and self._info[row] is not None:
            room = self.max_model_len - position
            self._learned.append((row * self.max_model_len + position, tokens[:room]))

    def take_learned(self) -> tuple[np.ndarray, np.ndarray]:
        """(places, values) of learned tokens, scattered before the next plan's diffs, which may start a row anew. Each
        place occurs once, with the newest value."""
        if not self._learned:
            return NOTHING, NOTHING
        words = {place + index: token for place, tokens in self._learned for index, token in enumerate(tokens)}
        self._learned = []
        return np.array(list(words), np.int32), np.array(list(words.values()), np.int32)

    def info(self, row: int) -> RowInfo:
        found = self._info[row]
        if found is None:
            raise InvariantError(f"row {row} of the request table is empty")
        return found

    def bits(self, rows: np.ndarray) -> np.ndarray:
        """What each of the rows asks of sampling beyond a temperature, as `Wants`."""
        found: np.ndarray = self._bits[rows]
        return found

    @property
    def plain(self) -> bool:
        """No row asks for more than a temperature: most steps of most servers."""
        return not self._bits.any()

    def room(self, group: int, row: int) -> int:
        """Tokens of a row for which it has blocks, and places."""
        return min(int(self._num_blocks[group, row]) * self.block_size, self.max_model_len)

    def ages(self, rows: np.ndarray) -> np.ndarray:
        """How many sequences each of the rows has had: another number, another sequence."""
        found: np.ndarray = self._ages[rows]
        return found

    def apply(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Take note of a plan's changes; returns (places, values) for the scatter that makes them on the
        device."""
        # A plan that failed here may have left some; a scatter with two values for one place has no order.
        self._places, self._values = [], []
        for row in plan.freed_rows:
            self._info[row] = None
            self._bits[row] = 0
        for start in plan.starts:
            self._start(start)
        places: list[int] = []
        values: list[int] = []
        for row, group, first, blocks in plan.diffs:
            base = self._table_base[group] + row * self._width + first
            self._num_blocks[group, row] = first + len(blocks)
            mine = self.host_tables[group][row, first : first + len(blocks)]
            if len(blocks) >= _LONG_DIFF:
                mine[:] = _words(blocks)
                self._places.append(np.arange(base, base + len(mine), dtype=np.int32))
                self._values.append(mine)
                continue
            places.extend(range(base, base + len(blocks)))
            values.extend(blocks)
            mine[:] = blocks
        for entry in plan.entries:
            known = entry.drafts or entry.given
            if known:
                end = entry.row * self.max_model_len + entry.start + entry.num_tokens
                places.extend(range(end - len(known), end))
                values.extend(known)
        if places:
            self._places.append(np.array(places, np.int32))
            self._values.append(np.array(values, np.int32))
        return self._take()

    def told(self, entries: Sequence[PlanEntry]) -> tuple[np.ndarray, np.ndarray]:
        """(places, values) of drafts that another stage has told, for a scatter."""
        places = [entry.row * self.max_model_len + entry.start + 1 + index
                  for entry in entries for index in range(len(entry.drafts))]
        return np.array(places, np.int32), np.array([token for entry in entries for token in entry.drafts], np.int32)

    def _take(self) -> tuple[np.ndarray, np.ndarray]:
        if not self._places:
            return NOTHING, NOTHING
        merged = np.concatenate(self._places), np.concatenate(self._values)
        self._places, self._values = [], []
        return merged

    def _start(self, start: RowStart) -> None:
        base = start.row * self.max_model_len
        self._places.append(np.arange(base, base + len(start.token_ids), dtype=np.int32))
        self._values.append(_words(start.token_ids))
        place = self._state_base + start.row * FIELDS
        info = self._info[start.row] = self._row_info(start)
        self._bits[start.row] = info.settings.bits
        self._num_blocks[:, start.row] = 0
        self._ages[start.row] += 1
        self._places.append(np.arange(place, place + 6, dtype=np.int32))
        self._values.append(_state_words(start, elsewhere=bool(info.settings.wants & Wants.DRAW)))

    def _row_info(self, start: RowStart) -> RowInfo:
        params = start.params
        # The history stays out of the host's copy: the row of tokens on the device is the history.
        state = SamplingRow(params, start.seed, start.sequence_index, (), 0, start.stop_ids, ())
        state.history = None
        words = tuple(tuple(word) for word in start.bad_words)
        settings = RowSettings.of(start, self._vocab_size)
        info = RowInfo(params, start.num_prompt_tokens, bool(settings.wants), state, words, settings)
        if params.logprobs is not None:
            silent = state.ahead(())
            silent.params = replace(params, logprobs=None)
            quiet = settings.unreported()
            info.unreported = RowInfo(silent.params, start.num_prompt_tokens, bool(quiet.wants), silent, words, quiet)
        return info


class DraftView(DeviceTable):
    """A table as a draft model sees it: its cache groups are these of the table's, and it reports nothing."""

    def __init__(self, table: DeviceTable, groups: Sequence[int]) -> None:
        self._table = table
        self.num_rows, self.max_model_len, self.block_size = table.num_rows, table.max_model_len, table.block_size
        self.arena, self.tokens, self.state = table.arena, table.tokens, table.state
        self.tables = tuple(table.tables[group] for group in groups)
        self._learned = []

    def info(self, row: int) -> RowInfo:
        found = self._table.info(row)
        return found.unreported or found

    def bits(self, rows: np.ndarray) -> np.ndarray:
        return self._table.bits(rows) & ~int(Wants.LOGPROBS)

    @property
    def plain(self) -> bool:
        return self._table.plain

    def ages(self, rows: np.ndarray) -> np.ndarray:
        return self._table.ages(rows)


NOTHING = np.zeros(0, np.int32)
_LONG_DIFF = 16
"""Blocks of a diff that is worth arrays of its own. Most have one block, and are gathered in lists."""


def _words(numbers: list[int]) -> np.ndarray:
    """As int32. Two or three times as fast as `np.array`, if none is negative."""
    try:
        return np.frombuffer(array("I", numbers), np.int32)
    except OverflowError:
        return np.array(numbers, np.int32)


def _state_words(start: RowStart, elsewhere: bool) -> np.ndarray:
    """The sampling state of a row as the drawing kernel reads it; `elsewhere`: it leaves the row to others."""
    params = start.params
    greedy = params.greedy or params.top_k == 1
    floats = np.array(
        [
            0.0 if greedy else min(params.temperature, 1e30),
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
        ],
        np.float32,
    )
    seed = signed_seed(start.seed) & ((1 << 64) - 1)
    words = np.array([seed & 0xFFFFFFFF, seed >> 32, start.sequence_index, elsewhere], np.uint32).view(np.int32)
    return np.concatenate([floats.view(np.int32), words])
