"""Rows of the worker's request table: who has which, and what the worker has not been told yet."""

from __future__ import annotations

from quire.errors import InvariantError
from quire.scheduler.plan import RowStart
from quire.scheduler.request import Sequence


class RowBook:
    """Hands out rows. What changes goes into the next plan, freed rows before started ones."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._freed: list[int] = []
        self._starts: list[RowStart] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self._num_rows - len(self._free)

    def take(self, seq: Sequence) -> None:
        """Seat a sequence: the worker gets all the tokens it knows."""
        request = seq.request
        seq.row = self._free.pop()
        self._starts.append(RowStart(
            seq.row, list(seq.tokens), seq.num_prompt_tokens, request.worker_params, request.seed, seq.index,
            sorted(request.stop_ids), request.bad_words))

    def leave(self, seq: Sequence) -> None:
        if seq.row < 0:
            return
        if self._starts:
            self._starts = [start for start in self._starts if start.row != seq.row]
        self._freed.append(seq.row)
        self._free.append(seq.row)

    def take_changes(self) -> tuple[list[int], list[RowStart]]:
        """Rows freed and rows started since the last plan."""
        changes = self._freed, self._starts
        self._freed, self._starts = [], []
        return changes

    def check(self, taken: list[int]) -> None:
        if sorted(taken + self._free) != list(range(self._num_rows)):
            raise InvariantError("rows of the request table are lost or shared")
