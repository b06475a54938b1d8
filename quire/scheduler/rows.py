"""Rows of the worker's request table: who has which, and what the worker has not been told yet."""

from __future__ import annotations

from collections.abc import Iterable

from quire.errors import InvariantError
from quire.scheduler.plan import RowStart
from quire.scheduler.request import Request, Sequence, Status


class RowBook:
    """Hands out rows. What changes goes into the next plan, freed rows before started ones."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._freed: list[int] = []
        self._starts: list[RowStart] = []
        self._owed: dict[Request, int] = {}
        """Rows that running groups will need for sequences not forked yet; only those that need some."""
        self._num_owed = 0
        self._touched: dict[Request, None] = {}
        """Groups whose debt may have changed since it was last counted."""

    @property
    def num_spare(self) -> int:
        """Free rows that no running group will need for its sequences. Costs as much as groups have changed."""
        for request in self._touched:
            owed = rows_owed(request)
            self._num_owed += owed - self._owed.pop(request, 0)
            if owed:
                self._owed[request] = owed
        self._touched.clear()
        return len(self._free) - self._num_owed

    @property
    def num_taken(self) -> int:
        return self._num_rows - len(self._free)

    def take(self, seq: Sequence) -> None:
        """Seat a sequence: the worker gets all the tokens it knows."""
        request = seq.request
        if request.grouped:
            self._touched[request] = None
        seq.own_tokens()
        seq.row = self._free.pop()
        self._starts.append(RowStart(
            seq.row, self._tokens_of(seq), seq.num_prompt_tokens, request.worker_params, request.seed, seq.index,
            sorted(request.stop_ids), request.bad_words))

    def _tokens_of(self, seq: Sequence) -> list[int]:
        """All tokens it knows; one list for all samples of a prompt that start in one step."""
        before = self._starts[-1].token_ids if self._starts and seq.request.grouped else []
        return before if before == seq.tokens else list(seq.tokens)

    def leave(self, seq: Sequence) -> None:
        if seq.request.grouped:
            self._touched[seq.request] = None
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

    def check(self, taken: list[int], running: Iterable[Request]) -> None:
        if sorted(taken + self._free) != list(range(self._num_rows)):
            raise InvariantError("rows of the request table are lost or shared")
        if self.num_spare != len(self._free) - sum(map(rows_owed, running)):
            raise InvariantError("rows that running groups will need were miscounted")


def rows_owed(request: Request) -> int:
    """Rows that a running group will need for sequences that are not forked yet."""
    if request.status is not Status.RUNNING or not request.grouped:
        return 0
    return request.rows_wanted - sum(seq.row >= 0 for seq in request.sequences)
