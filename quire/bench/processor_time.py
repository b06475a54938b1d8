"""Who had the processors while something ran: a process with its children, other processes, or the machine's host.

Two engines that run one after the other can be compared only where both had the machine to themselves."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_MOST_TAKEN = 0.02
"""Share of the processor time that others may take of a run. A second of a core that others take costs a run about half
a second on two cores, whichever engine it is; so at most 2%."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds on the cores that this process may use, since the machine started; `own`: of the process and its
    children alone."""

    at: float
    busy: float
    stolen: float
    own: float


@dataclass(frozen=True, slots=True)
class Taken:
    """Shares of the processor time that there was between two readings."""

    others: float
    """Other processes of this machine."""
    stolen: float
    """The host, which runs other machines too."""

    @property
    def disturbed(self) -> bool:
        return self.others + self.stolen > _MOST_TAKEN


class ProcessorWatch:
    """Of the process `pid` and all its children. `proc` is where the system keeps its counts."""

    def __init__(self, pid: int, proc: Path = Path("/proc"), cores: set[int] | None = None) -> None:
        self._pid, self._proc = pid, proc
        self._cores = os.sched_getaffinity(0) if cores is None else cores
        self._tick = 1 / os.sysconf("SC_CLK_TCK")

    def read(self) -> Reading:
        busy = stolen = 0
        for line in (self._proc / "stat").read_text().splitlines():
            name, *rest = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, rest[:8])
                busy += user + nice + system + irq + softirq
                stolen += steal
        return Reading(time.monotonic(), busy * self._tick, stolen * self._tick, self._own_ticks() * self._tick)

    def taken(self, before: Reading, after: Reading) -> Taken:
        there_was = len(self._cores) * (after.at - before.at)
        others = (after.busy - before.busy) - (after.own - before.own)
        return Taken(max(0.0, others) / there_was, (after.stolen - before.stolen) / there_was)

    def _own_ticks(self) -> int:
        """Children that have ended are counted by those who waited for them."""
        ticks: dict[int, int] = {}
        children: dict[int, list[int]] = {}
        for entry in self._proc.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue  # it has ended meanwhile
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(int(entry.name))
        total, left = 0, [self._pid]
        while left:
            pid = left.pop()
            total += ticks.get(pid, 0)
            left += children.get(pid, [])
        return total
