"""Ranks as threads of the test: decoders and workers that share one model, driven side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.engine.assembly.source import open_source
from quire.models.build import build_decoder, stored_parts
from quire.models.registry import read_spec
from quire.models.shard import Shard, shard_of
from quire.models.stored_parts import NOTHING, take
from quire.ops.cpu import CpuOps
from quire.parallel.collectives import Collectives
from quire.parallel.place import Place
from quire.parallel.threads import thread_collectives
from quire.scheduler.plan import StepPlan, StepResult
from quire.worker.memory import PoolSize
from quire.worker.passes import Passes
from quire.worker.worker import Worker

T = TypeVar("T")


def side_by_side(calls: Sequence[Callable[[], T]], give_up: Callable[[], None] = lambda: None) -> list[T]:
    """Run each in a thread of its own. If one raises, `give_up` ends the others' waiting; then it is raised here."""
    found: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except BaseException as error:
            errors.append(error)
            give_up()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


class RankDecoder:
    """One rank's decoder, for a `PagedDriver`: its logits are those of the rank that draws, zeros elsewhere."""

    def __init__(self, config: dict[str, Any], weights: Sequence[tuple[str, Tensor]], shard: Shard,
                 collectives: Collectives) -> None:
        parts = stored_parts(config, shard)
        cut = [(name, tensor, parts.ranges(name, tuple(tensor.shape))) for name, tensor in weights]
        mine = [(name, tensor.clone() if ranges is None else take(tensor, ranges)) for name, tensor, ranges in cut
                if ranges != NOTHING]
        self._decoder = build_decoder(config, mine, CpuOps(num_threads=1), max_model_len=128, shard=shard,
                                      ranks=collectives.group)
        self._passes = Passes(self._decoder, collectives)
        self.spec, self.allocate_caches = self._decoder.spec, self._decoder.allocate_caches
        self.forward, self.recorder = self._passes.forward, self._passes.recorder

    def logits(self, hidden: Any, ctx: Any = None) -> Tensor:
        found = self._passes.logits(hidden)
        return torch.zeros(len(hidden), self.spec.vocab_size) if found is None else found


def rank_decoders(config: dict[str, Any], weights: Sequence[tuple[str, Tensor]], tensor_size: int, num_stages: int,
                  collectives: Sequence[Collectives] | None = None) -> list[RankDecoder]:
    spec = read_spec(config)
    groups = thread_collectives(tensor_size, num_stages) if collectives is None else collectives
    return [RankDecoder(config, weights, shard_of(spec, place), collectives)
            for place, collectives in zip(Place.all(tensor_size, num_stages), groups, strict=True)]


class RankWorkers:
    """The workers of all ranks of an engine. They carry out each plan together, as an executor of ranks makes them."""

    def __init__(self, config: EngineConfig, pool: PoolSize, tensor_size: int, num_stages: int,
                 collectives: Sequence[Collectives] | None = None) -> None:
        self.places = Place.all(tensor_size, num_stages)
        self._collectives = thread_collectives(tensor_size, num_stages) if collectives is None else collectives
        spec = read_spec(open_source(config).config)
        self.workers = self._together([
            lambda place=place, peers=peers: Worker(open_source(config), config, shard_of(spec, place), peers, pool)
            for place, peers in zip(self.places, self._collectives, strict=True)])
        self._drawn: list[tuple[int, int, list[int]]] = []

    def _together(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        return side_by_side(calls, lambda: [each.close() for each in self._collectives] and None)

    def execute(self, plan: StepPlan) -> StepResult:
        """The result of the rank that draws. Earlier stages learn what was drawn with the next plan."""
        results = self._together([lambda place=place, worker=worker: self._execute(place, worker, plan)
                                  for place, worker in zip(self.places, self.workers, strict=True)])
        result = next(found for place, found in zip(self.places, results, strict=True) if place.is_sampler)
        self._drawn = [(entry.row, entry.drawn_at, one.tokens)
                       for entry, one in zip(plan.entries, result.entries, strict=True) if one.tokens]
        return result

    def _execute(self, place: Place, worker: Worker, plan: StepPlan) -> StepResult:
        if not place.is_last:
            for row, position, tokens in self._drawn:
                worker.learn(row, position, tokens)
        result = worker.execute(plan)
        reports = list(result.arrivals)
        # The plans that follow were made when these had arrived.
        while {start.number for start in plan.transfers} - {report.number for report in reports if report.finished}:
            assert worker.arrivals.wait(60.0)
            reports += worker.arrivals.take()
        return result

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
