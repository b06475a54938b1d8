"""Blocks reserved for KV that another engine writes: arrival by token range, cancelling, quarantine.

A reservation's blocks are out of circulation from `reserve` until its writer can do no harm any more: all of it has
arrived, or the writer has confirmed that it stopped. Its number is never used again, so a writer that checks it before
each write (an epoch) can be confirmed on its behalf at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.kvcache.table import SequenceKV
from quire.kvcache.transfers import Fetch


class ReservationState(enum.Enum):
    OPEN = "open"
    """Its writer may write."""
    QUARANTINED = "quarantined"
    """Cancelled; its writer has not confirmed that it stopped."""
    CLOSED = "closed"
    """Its blocks are given back."""


@dataclass(slots=True, eq=False)
class Reservation:
    number: int
    """Also the epoch of its writes."""
    kv: SequenceKV
    """The reservation's own hold on the blocks, those before `start` included."""
    start: int
    """First token that is to be written from outside: the KV of those before is there."""
    num_tokens: int
    """Where it ends."""
    block_size: int
    fetch: Fetch
    """What a request waits for that is to run on these blocks."""
    deadline: float
    state: ReservationState = ReservationState.OPEN
    _ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_arrived(self) -> int:
        """Tokens whose KV is there, contiguous from the first one of the sequence."""
        first = self._ranges[0] if self._ranges else (self.start, self.start)
        return first[1] if first[0] <= self.start else self.start

    @property
    def complete(self) -> bool:
        return self.num_arrived >= self.num_tokens

    def add(self, start: int, end: int) -> None:
        """Tokens start … end-1 have arrived; ranges may come in any order, and twice."""
        start, end = max(start, self.start), min(end, self.num_tokens)
        if start >= end:
            return
        merged: list[tuple[int, int]] = []
        for known in sorted([*self._ranges, (start, end)]):
            if merged and known[0] <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], known[1]))
            else:
                merged.append(known)
        self._ranges = merged
        first_missing = self.num_arrived // self.block_size if not self.complete else None
        for group, table in enumerate(self.kv.tables):
            for i, block in enumerate(table.blocks):
                if first_missing is None or i < first_missing:
                    self.fetch.pending.discard((group, block))


class Reservations:
    def __init__(self, free: Callable[[SequenceKV], None]) -> None:
        self._free = free
        self._reservations: dict[int, Reservation] = {}
        self._number = 0
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._reservations)

    def open(self, kv: SequenceKV, start: int, num_tokens: int, block_size: int, deadline: float) -> Reservation:
        """Take over a hold on blocks for tokens up to `num_tokens`; closed at once if none are to be written."""
        self._number += 1
        first = start // block_size
        pending = {(group, block) for group, table in enumerate(kv.tables)
                   for block in table.blocks[max(first, table.first_live):]}
        made = Reservation(self._number, kv, start, num_tokens, block_size, Fetch(pending, awaited=True), deadline)
        self._reservations[made.number] = made
        if made.complete:
            # The device has all of it: there is nothing to be written.
            self._end(made)
        return made

    def get(self, number: int) -> Reservation | None:
        return self._reservations.get(number)

    def renew(self, number: int, deadline: float) -> None:
        """Its writer has given a sign of life: wait for it until then."""
        reservation = self._reservations.get(number)
        if reservation is not None:
            reservation.deadline = max(reservation.deadline, deadline)

    def arrived(self, number: int, start: int, end: int) -> bool:
        """KV of tokens start … end-1 was written; false if the reservation takes no more: the range counts for nothing.

        Once all of it is there the writer is done, and the reservation ends by itself.
        """
        reservation = self._reservations.get(number)
        if reservation is None or reservation.state is not ReservationState.OPEN:
            return False
        reservation.add(start, end)
        if reservation.complete:
            self._end(reservation)
        return True

    def cancel(self, number: int, reason: str = "the reservation was cancelled") -> bool:
        """Who waits goes on with what has arrived. The blocks stay out of circulation until `confirm`."""
        reservation = self._reservations.get(number)
        if reservation is None or reservation.state is not ReservationState.OPEN:
            return False
        reservation.state = ReservationState.QUARANTINED
        reservation.fetch.error = reservation.fetch.error or reason
        return True

    def confirm(self, number: int) -> bool:
        """The writer of a cancelled reservation will not write any more, or cannot: its blocks are free."""
        reservation = self._reservations.get(number)
        if reservation is None or reservation.state is not ReservationState.QUARANTINED:
            return False
        self._close(reservation)
        return True

    def _end(self, reservation: Reservation) -> None:
        reservation.fetch.awaited = False
        self._close(reservation)

    def _close(self, reservation: Reservation) -> None:
        reservation.state = ReservationState.CLOSED
        del self._reservations[reservation.number]
        self._free(reservation.kv)

    def expire(self, now: float) -> None:
        """Cancel those whose writer is late."""
        for reservation in list(self._reservations.values()):
            if reservation.state is ReservationState.OPEN and now >= reservation.deadline:
                self.num_expired += 1
                self.cancel(reservation.number, "its KV did not arrive in time")

    @property
    def next_end(self) -> float | None:
        return min((r.deadline for r in self._reservations.values() if r.state is ReservationState.OPEN), default=None)

    @property
    def num_quarantined(self) -> int:
        return sum(r.state is ReservationState.QUARANTINED for r in self._reservations.values())

    @property
    def holders(self) -> list[SequenceKV]:
        return [reservation.kv for reservation in self._reservations.values()]
