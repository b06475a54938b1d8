"""Transfers of KV that every rank makes for its own part: how far one has come is how far the slowest rank has."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.scheduler.plan import TransferReport, TransferStart


@dataclass(slots=True)
class _Open:
    done: list[int]
    finished: set[int] = field(default_factory=set)
    error: str | None = None
    reported: int = -1


class TransferTally:
    """Reports of ranks in, reports of the whole transfer out. A block has arrived when every rank has its part."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._open)

    def start(self, transfers: list[TransferStart]) -> None:
        for transfer in transfers:
            self._open[transfer.number] = _Open([0] * self._num_ranks)

    def take(self, rank: int, report: TransferReport) -> TransferReport | None:
        """What a rank says; what is to be said of the whole, if that has changed."""
        moving = self._open.get(report.number)
        if moving is None:
            return None  # it has been given up
        moving.done[rank] = max(moving.done[rank], report.num_done)
        if moving.error is None:
            moving.error = report.error
        if report.finished:
            moving.finished.add(rank)
        done, finished = min(moving.done), len(moving.finished) == self._num_ranks
        if finished:
            del self._open[report.number]
            return TransferReport(report.number, done, True, moving.error)
        if done <= max(moving.reported, 0):
            return None
        moving.reported = done
        return TransferReport(report.number, done)

    def give_up(self, error: str) -> list[TransferReport]:
        """No rank will say any more: the last reports of all that is under way."""
        ended = [TransferReport(number, min(moving.done), True, error) for number, moving in self._open.items()]
        self._open.clear()
        return ended
