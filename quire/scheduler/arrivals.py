"""Where threads that move KV leave their reports, and what wakes a core that has nothing else to do."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from quire.scheduler.plan import TransferReport


class ArrivalBox:
    """Reports of transfers from any thread, taken by the core; `ring` wakes it without a report."""

    def __init__(self) -> None:
        self._reports: deque[TransferReport] = deque()
        self._rung = threading.Event()
        self.on_ring: Callable[[], None] | None = None
        """Called on every ring, on the thread that rings: for a loop that waits for other things as well."""

    def put(self, report: TransferReport) -> None:
        self._reports.append(report)
        self.ring()

    def ring(self) -> None:
        """Something that the core may be waiting for has happened."""
        self._rung.set()
        told = self.on_ring
        if told is not None:
            told()

    def take(self) -> list[TransferReport]:
        """All reports there are, in their order; the bell counts as heard."""
        self._rung.clear()
        taken: list[TransferReport] = []
        while self._reports:
            taken.append(self._reports.popleft())
        return taken

    def wait(self, seconds: float) -> bool:
        """Wait until `ring` is called, at most so long; returns whether it was."""
        return self._rung.wait(seconds)
