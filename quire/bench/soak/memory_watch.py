"""Resident memory of processes over time, and how much it grows once a process has warmed up."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(slots=True)
class MemoryCurve:
    """Samples of one process, at equal distances in time."""

    samples: list[int] = field(default_factory=list)
    pid: int = 0

    def add(self, pid: int, size: int) -> None:
        """Of a process that was replaced, only what comes after counts."""
        if pid != self.pid:
            self.samples.clear()
            self.pid = pid
        self.samples.append(size)

    def growth(self, warm_up: float) -> float | None:
        """By what share the last fifth of the samples after `warm_up` (a share of all) is above the first fifth.

        Medians, since a garbage collection more or less is no growth. None with too few samples to say.
        """
        kept = self.samples[int(len(self.samples) * warm_up) :]
        fifth = len(kept) // 5
        if not fifth:
            return None
        return statistics.median(kept[-fifth:]) / statistics.median(kept[:fifth]) - 1.0

    def summary(self, warm_up: float) -> dict[str, Any]:
        kept = self.samples[int(len(self.samples) * warm_up) :] or [0]
        growth = self.growth(warm_up)
        return {"samples": len(self.samples), "warm_mb": round(kept[0] / 1e6, 1), "end_mb": round(kept[-1] / 1e6, 1),
                "most_mb": round(max(kept) / 1e6, 1),
                "series_mb": [round(size / 1e6, 1) for size in self.samples[:: max(1, len(self.samples) // 20)]],
                "growth": None if growth is None else round(growth, 5)}


async def watch_memory(pids: Mapping[str, Callable[[], int | None]], curves: dict[str, MemoryCurve],
                       seconds: float) -> None:
    """Sample named processes every so many seconds, until cancelled."""
    while True:
        for name, pid_of in pids.items():
            pid = pid_of()
            size = 0 if pid is None else resident(pid)
            if pid is not None and size:
                curves.setdefault(name, MemoryCurve()).add(pid, size)
        await asyncio.sleep(seconds)
