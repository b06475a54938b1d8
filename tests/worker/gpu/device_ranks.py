"""Ranks of the device worker as threads over CPU tensors: they talk through the slots and rows that GPUs use, and wait
for each other at barriers instead of in kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from quire.config import CacheConfig
from quire.models.build import dummy_weights, stored_parts
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.ops.cpu import CpuOps
from quire.parallel.collectives import Link
from quire.parallel.peers import HEAD_BYTES, PeerGroup, PeerLink, group_bytes
from quire.parallel.place import Place
from quire.scheduler.plan import StepPlan, StepResult
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.passes import DeviceRanks
from quire.worker.gpu.speculation import Speculation
from quire.worker.gpu.told import LinkTalk
from quire.worker.gpu.worker import GpuWorker, RankShare
from tests.parallel_ranks.rank_threads import side_by_side

SECONDS = 120.0
Weights = Callable[..., Any]
"""Of a config, those that `parts` of it want."""


class _Rows:
    """Memory of a link, and who has written or read it."""

    def __init__(self, slot_bytes: int) -> None:
        self.memory = torch.zeros(HEAD_BYTES + slot_bytes, dtype=torch.uint8)
        self.free, self.full = threading.Semaphore(1), threading.Semaphore(0)

    def sender(self) -> PeerLink:
        return PeerLink(self.memory, torch.float32, _taking(self.free), self.full.release)

    def receiver(self) -> PeerLink:
        return PeerLink(self.memory, torch.float32, _taking(self.full), self.free.release)


def _taking(semaphore: threading.Semaphore) -> Callable[[], None]:
    def take() -> None:
        assert semaphore.acquire(timeout=SECONDS)

    return take


def device_ranks(tensor_size: int, num_stages: int, slot_bytes: int = 1 << 16) -> tuple[list[DeviceRanks], Any]:
    """One for each of `Place.all(tensor_size, num_stages)`, and what ends their waiting."""
    barriers = [threading.Barrier(tensor_size) for _ in range(num_stages)]
    memories = [[torch.zeros(group_bytes(slot_bytes), dtype=torch.uint8) for _ in range(tensor_size)]
                for _ in range(num_stages)]
    links = [[_Rows(slot_bytes) for _ in range(tensor_size)] for _ in range(num_stages)]
    found = []
    for place in Place.all(tensor_size, num_stages):
        barrier, rank, stage = barriers[place.stage], place.tensor_rank, place.stage
        ranks = DeviceRanks()
        if tensor_size > 1:
            ranks.group = PeerGroup(rank, memories[stage], lambda turn, barrier=barrier: barrier.wait(SECONDS))
        if not place.is_last:
            ranks.after = links[stage][rank].sender()
        if not place.is_first:
            ranks.before = links[stage - 1][rank].receiver()
        found.append(ranks)
    return found, lambda: [barrier.abort() for barrier in barriers]


class _Queue(Link):
    """One direction between two stages, on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._some = bytearray(), threading.Condition()

    def send(self, data: memoryview) -> None:
        with self._some:
            self._bytes += data
            self._some.notify()

    def receive(self, into: memoryview) -> None:
        with self._some:
            assert self._some.wait_for(lambda: len(self._bytes) >= len(into), SECONDS)
            into[:] = self._bytes[: len(into)]
            del self._bytes[: len(into)]


def talks_of(tensor_size: int, num_stages: int) -> dict[Place, LinkTalk | None]:
    """A ring of stages for every tensor rank."""
    if num_stages == 1:
        return dict.fromkeys(Place.all(tensor_size, num_stages))
    queues = [[_Queue() for _ in range(tensor_size)] for _ in range(num_stages)]
    return {place: LinkTalk(place, queues[place.stage - 1][place.tensor_rank], queues[place.stage][place.tensor_rank])
            for place in Place.all(tensor_size, num_stages)}


class DeviceRankWorkers:
    """The workers of all ranks, which carry out each plan together."""

    def __init__(self, config: dict[str, Any], cache: CacheConfig, options: DeviceOptions, tensor_size: int,
                 num_stages: int, speculation: Callable[[], Speculation | None] = lambda: None,
                 weights: Weights = dummy_weights) -> None:
        self.places = Place.all(tensor_size, num_stages)
        self.ranks, self._give_up = device_ranks(tensor_size, num_stages)
        spec = read_spec(config)
        self.workers: list[GpuWorker] = []
        talks = talks_of(tensor_size, num_stages)

        def build(place: Place, ranks: DeviceRanks) -> GpuWorker:
            asked = speculation()
            shard = shard_of(spec, place, stages_help=False, reads_tokens=asked is not None and asked.head is not None)
            return GpuWorker(config, weights(config, parts=stored_parts(config, shard)), cache, options,
                             ops=CpuOps(num_threads=1), speculation=asked,
                             share=RankShare(shard, ranks, lambda pool: pool, talk=talks[place]))

        self.workers = side_by_side([lambda place=place, ranks=ranks: build(place, ranks)
                                     for place, ranks in zip(self.places, self.ranks, strict=True)], self._give_up)
        self._drawn: list[tuple[int, int, list[int]]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """The result of the rank that answers; every rank of the last stage has the same."""
        results = side_by_side([lambda place=place, worker=worker: self._execute(place, worker, plan)
                                for place, worker in zip(self.places, self.workers, strict=True)], self._give_up)
        drawn = [found.entries for place, found in zip(self.places, results, strict=True) if place.is_last]
        assert all(each == drawn[0] for each in drawn)
        self._drawn = [(entry.row, entry.drawn_at, one.tokens)
                       for entry, one in zip(plan.entries, drawn[0], strict=True) if one.tokens]
        return StepResult(plan.step, drawn[0])

    def _execute(self, place: Place, worker: GpuWorker, plan: StepPlan) -> StepResult:
        if not place.is_last:
            for row, position, tokens in self._drawn:
                worker.learn(row, position, tokens)
        result = worker.execute(plan)
        reports = list(result.arrivals)
        # The plans that follow were made when these had arrived.
        while {start.number for start in plan.transfers} - {report.number for report in reports if report.finished}:
            assert worker.arrivals.wait(SECONDS)
            reports += worker.arrivals.take()
        return result

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
