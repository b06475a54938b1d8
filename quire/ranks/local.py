"""An executor over processes of this machine: memory that they share, who reads what, and how they are started."""

from __future__ import annotations

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
from quire.ranks.start import MemoryAddress, RankStart
from quire.ranks.workers import DUMMY

SPIN_SECONDS = 0.0002
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
        self.ring = RingWriter(self._ring_memory, len(places))
        self._shared: SharedMemory | None = None

    def start(self) -> list[RankHandle]:
        parts = self._share()
        stages = self.places[0].num_stages
        cores = len(os.sched_getaffinity(0))
        handles: list[RankHandle] = []
        try:
            for place in self.places:
                handles.append(self._rank())
                to, here = (place.stage + 1) % stages, place.stage
                handles[-1].link.send(Kind.START, RankStart(
                    place, self._worker, ranks_here=len(self.places),
                    spin_seconds=SPIN_SECONDS if len(self.places) <= cores else 0.0,
                    ring=MemoryAddress(os.getpid(), self._ring_memory.fd), reader=place.index,
                    num_readers=len(self.places), group=parts.get(("group", here, 0)),
                    before=parts.get(("link", here, place.tensor_rank)),
                    after=parts.get(("link", to, place.tensor_rank))).to_json())
        except BaseException:
            for handle in handles:
                handle.kill()
            raise
        return handles

    def _rank(self) -> RankHandle:
        return RankProcess()

    def _share(self) -> dict[tuple[str, int, int], MemoryAddress]:
        """One piece of memory for all groups and links. The link of a stage and tensor rank leads to it."""
        size, stages = self.places[0].tensor_size, self.places[0].num_stages
        if size * stages == 1 or self._worker["kind"] == DUMMY:  # nobody talks to anybody
            return {}
        from quire.parallel.shared import shared_group_bytes, shared_link_bytes

        sizes: dict[tuple[str, int, int], int] = {}
        for stage in range(stages):
            if size > 1:
                sizes[("group", stage, 0)] = shared_group_bytes(size)
            if stages > 1:
                sizes |= {("link", stage, rank): shared_link_bytes() for rank in range(size)}
        offsets, at = {}, 0
        for name, count in sizes.items():
            offsets[name] = at
            at += -(-count // 4096) * 4096
        self._shared = SharedMemory.create("ranks", at)
        return {name: MemoryAddress(os.getpid(), self._shared.fd, offsets[name], count)
                for name, count in sizes.items()}

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
