"""Whose grammar is compiled now: those that have taken least time so far, and of one tenant no more than its share.

So only large grammars wait behind a large one: a compilation that had its turn is paused for those that had none. The
time limit counts what a grammar's process has computed, not the time that it waited, for its turn or a processor.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from quire.structured.link import Link

_TURN_SECONDS = 0.25
_MOST_STARTED = 16
"""Each of them has memory: of more than that, the one that has taken longest is given up."""


@dataclass(slots=True, eq=False)
class CompileJob:
    tenant: str
    begin: Callable[[bool], Link]
    """Starts the process that does it; after the engine's own work from the first moment (True), or once it shows that
    it takes longer than most."""
    give_up: Callable[[str], None]
    """Called with the reason where the queue ends it."""
    link: Link | None = None
    running: bool = False

    @property
    def spent(self) -> float:
        """Seconds that it has computed so far."""
        return 0.0 if self.link is None else self.link.cpu_seconds


class CompileQueue:
    def __init__(self, at_once: int, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_once, self._timeout, self._clock = at_once, timeout, clock
        self._jobs: list[CompileJob] = []
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: CompileJob) -> None:
        self._jobs.append(job)
        self.turn(now=True)

    def remove(self, job: CompileJob) -> None:
        """It is done, or was cancelled."""
        if job in self._jobs:
            self._jobs.remove(job)
            if job.link is not None:
                job.link.resume()
            self.turn(now=True)

    def turn(self, now: bool = False) -> None:
        """Give the places to those whose turn it is."""
        clock = self._clock()
        if not self._jobs or (not now and clock < self._next_look):
            return
        self._next_look = clock + _TURN_SECONDS / 4
        self._drop_slowest()
        chosen = self._choose()
        for job in self._jobs:
            if job.running and job not in chosen:
                job.running = False
                if job.link is not None:
                    job.link.pause()
        for job in chosen:
            if not job.running:
                job.running = True
                if job.link is None:
                    # One at a time: who asks for many at once does not get the processors for all of them.
                    job.link = job.begin(any(other.tenant == job.tenant and other.link is not None
                                             for other in self._jobs))
                else:
                    job.link.resume()

    def _choose(self) -> list[CompileJob]:
        left, taken = list(self._jobs), Counter[str]()
        chosen: list[CompileJob] = []
        while left and len(chosen) < self._at_once:
            best = min(left, key=lambda job: (taken[job.tenant], _level(job.spent), not job.running))
            left.remove(best)
            chosen.append(best)
            taken[best.tenant] += 1
        return chosen

    def _drop_slowest(self) -> None:
        for job in [job for job in self._jobs if job.spent > self._timeout]:
            self._give_up(job, f"took longer than {self._timeout:g} s to compile: simplify it, or raise "
                               "grammar_timeout")
        started = [job for job in self._jobs if job.link is not None]
        if len(started) > _MOST_STARTED:
            slowest = max(started, key=lambda job: job.spent)
            self._give_up(slowest, "is slow to compile, and too many other grammars wait: simplify it, or try again "
                                   "later")

    def _give_up(self, job: CompileJob, reason: str) -> None:
        self._jobs.remove(job)
        job.give_up(reason)


def _level(seconds: float) -> int:
    """How many turns it has had, each twice as long as the one before."""
    return int(math.log2(1.0 + seconds / _TURN_SECONDS))
