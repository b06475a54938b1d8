"""Consistency checks while the engine is idle, in slices short enough that no request waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from quire.scheduler.scheduler import Scheduler

EXAMINE_EVERY = 10.0
"""Seconds between two examinations."""
_SLICE_SECONDS = 0.0005
"""A slice ends with the part in which this is over; a part takes a fraction of a millisecond."""


class SelfCheck:
    """One examination after another, each a run of slices between which nothing may change."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic,
                 stopwatch: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._stopwatch = stopwatch
        self._parts: Iterator[None] | None = None
        self._changed = True
        self._examined_at = self._cut_short_at = float("-inf")

    def disturb(self) -> None:
        """Something changed: an examination that had begun must begin again."""
        if self._parts is not None:
            self._cut_short_at = self._clock()
        self._parts, self._changed = None, True

    @property
    def due(self) -> bool:
        """Is there anything for `slice` to do now?"""
        if not self._changed or self._scheduler.has_work:
            return False
        return self._scheduler.broken or self._clock() - self._examined_at >= EXAMINE_EVERY

    def slice(self) -> None:
        """Go on for a fraction of a millisecond, if the engine is at rest and was not examined lately."""
        if not self.due:
            return
        if self._scheduler.broken:
            self._scheduler.mend()
        if self._parts is None:
            self._parts = self._scheduler.examination()
        until = self._stopwatch() + _SLICE_SECONDS
        for _ in self._parts:
            if self._stopwatch() >= until:
                return
        self._parts, self._changed = None, self._scheduler.mend()
        self._examined_at = self._clock()

    def glance(self) -> None:
        """A slice for whoever has work at hand: none soon after work cut an examination short. Of a large pool there
        is time for the first slice only, and batch after batch would wait for the same one."""
        if self._scheduler.broken or self._clock() - self._cut_short_at >= EXAMINE_EVERY:
            self.slice()

    def mend(self) -> None:
        """Work comes to an engine at rest: what is known to be broken is mended before."""
        if self._scheduler.broken and not self._scheduler.has_work:
            self._scheduler.mend()
