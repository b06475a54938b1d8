"""An executor over processes of this machine: memory that they share, who reads what, and how they are started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from quire.parallel.place import Place
from quire.ranks.executor import RankExecutor
from quire.ranks.frames import Kind
from quire.ranks.group import RankGroup
from quire.ranks.launch import RankHandle, RankProcess
from quire.ranks.ring import RingWriter, ring_bytes
from quire.ranks.shared_memory import SharedMemory
from quire.ranks.shared_parts import SharedParts
from quire.ranks.start import MemoryAddress, RankStart
from quire.ranks.workers import DUMMY

SPIN_SECONDS = 0.001
"""How long a rank looks for the next plan before it sleeps, where it has a processor to itself."""

Agree = Callable[[list[dict[str, Any]]], dict[str, Any]]


def same_for_all(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """For workers that have nothing to agree on."""
    return sizes[0]


class LocalLauncher:
    """Starts every rank in a process of this machine."""

    def __init__(self, places: list[Place], worker: dict[str, Any]) -> None:
        self.places = places
        self._worker = worker
        self._ring_memory = SharedMemory.create("ring", ring_bytes(len(places)))
        self._cores = sorted(os.sched_getaffinity(0))
        self._spin = len(places) <= len(self._cores)
        self.ring = RingWriter(self._ring_memory, len(places), offers_core=len(places) >= len(self._cores),
                               readers_spin=self._spin)
        self._shared: SharedMemory | None = None

    def start(self) -> list[RankHandle]:
        parts = None
        if len(self.places) > 1 and self._worker["kind"] != DUMMY:  # else ranks exchange nothing
            parts = SharedParts(self.places)
            self._shared = SharedMemory.create("ranks", parts.size)
        handles: list[RankHandle] = []
        try:
            for place in self.places:
                handles.append(self._rank())
                start = RankStart(
                    place, self._worker, ranks_here=len(self.places),
                    spin_seconds=SPIN_SECONDS if self._spin else 0.0,
                    ring=MemoryAddress(os.getpid(), self._ring_memory.fd), reader=place.index,
                    num_readers=len(self.places),
                    core=self._cores[place.index] if len(self.places) == len(self._cores) else None)
                if parts is not None and self._shared is not None:
                    start = parts.give(start, os.getpid(), self._shared.fd)
                handles[-1].link.send(Kind.START, start.to_json())
        except BaseException:
            for handle in handles:
                handle.kill()
            raise
        self._leave_core_of_sampler()
        return handles

    def _leave_core_of_sampler(self) -> None:
        """Where tensor ranks are as many as cores, the thread that listens to them would be woken on the core of the
        rank that has sent a result, and take it from that rank, which would get ready for the next plan only when that
        has come. Other ranks are ready by then. (Stages are not: they compute other steps.)"""
        if self.places[0].num_stages == 1 and 1 < len(self.places) == len(self._cores):
            drawing = next(place.index for place in self.places if place.is_sampler)
            with contextlib.suppress(OSError):  # some of them were taken away since
                os.sched_setaffinity(0, set(self._cores) - {self._cores[drawing]})

    def _rank(self) -> RankHandle:
        return RankProcess()

    def close(self) -> None:
        for memory in (self._ring_memory, self._shared):
            if memory is not None:
                memory.close()


def start_local(places: list[Place], worker: dict[str, Any], agree: Agree = same_for_all) \
        -> tuple[RankExecutor, dict[str, Any]]:
    """Processes of this machine, ready for plans, and what they have agreed on; or raises what kept one from it."""
    launcher = LocalLauncher(places, worker)
    executor = RankExecutor(places)
    group = RankGroup(launcher, agree, executor)
    executor.connect(group, launcher.ring)
    group.start()
    try:
        return executor, group.ready.result()
    except BaseException:
        group.close()
        raise
