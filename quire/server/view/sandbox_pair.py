"""Two small engines to look at, one of which computes prompts for the other: real schedulers, caches and protocol.

What travels is only counted, as the executor only pretends to compute. Each engine has a processor of its own: a step
of one takes no time of the other's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.engine.core import EngineCore
from quire.executor.dummy import DummyExecutor
from quire.peers.hub import PeerHub
from quire.peers.lane import Range
from quire.peers.memory import Landing, MemoryMover, Net, Node, Slots
from quire.peers.mover import Tables
from quire.scheduler.plan import StepPlan, StepResult
from quire.server.view.sandbox import Layout, Sandbox, Visitor, step_seconds

_TICK = 0.01
_RANGE_SECONDS = 0.02
_TRAVEL_SECONDS = 0.0002
"""Of one token's KV."""
_FOR_EVER = 1e9
_VOCABULARY = 1 << 20


class _NothingToMove(MemoryMover):
    """Blocks of pretended KV have no content."""

    def read(self, tables: Tables, starts: Sequence[int], start: int, end: int) -> Slots:
        return []

    def write(self, landing: Landing, slots: Slots, share: float) -> None:
        pass


class _TimedExecutor(DummyExecutor):
    """Remembers how long the last plans pretend to take."""

    seconds = 0.0

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.seconds += step_seconds(plan)
        return super().submit(plan)


@dataclass(slots=True)
class _Small:
    box: Sandbox
    core: EngineCore
    executor: _TimedExecutor
    free_at: float = 0.0


class SandboxPair:
    """`frames` runs both through a list of visitors, in time with the clock on the wall."""

    def __init__(self, decode: Layout, prefill: Layout, speed: float) -> None:
        self._speed, self._now = speed, 0.0
        self._net = Net(self._clock, {}, {}, reading=0.0, travels=_travel_seconds)
        self._small = [self._engine(decode, 0), self._engine(prefill, 1)]
        self._hubs = [self._join(small, place) for place, small in enumerate(self._small)]

    def _clock(self) -> float:
        return self._now

    def _engine(self, layout: Layout, place: int) -> _Small:
        box, executor = Sandbox(layout, place, self._speed, self._clock), _TimedExecutor(_VOCABULARY)
        core = EngineCore(box.scheduler, executor)
        core.trace = box.view
        return _Small(box, core, executor)

    def _join(self, small: _Small, place: int) -> PeerHub:
        mover = _NothingToMove(place)
        hub = PeerHub(small.core, mover, _VOCABULARY, 1, computes=place == 1, asks=place == 0, lease=_FOR_EVER,
                      patience=_FOR_EVER, least_tokens=64)
        self._net.add(Node(hub, mover))
        return hub

    async def frames(self, visitors: tuple[Visitor, ...]) -> AsyncIterator[bytes]:
        began = time.monotonic()
        coming = sorted(enumerate(visitors), key=lambda pair: pair[1].at)
        for small in self._small:
            yield small.box.view.frame()[0]
        while coming or self._busy:
            while coming and coming[0][1].at <= self._now:
                number, visitor = coming.pop(0)
                request = visitor.request(number)
                self._hubs[0].prepare(request, ["1"])
                self._small[0].core.add(request)
            self._net.tick()
            stepped = [small for small in self._small if small.free_at <= self._now and self._step(small)]
            if not stepped:
                self._now += _TICK
            await asyncio.sleep(max(0.0, began + self._now / self._speed - time.monotonic()))
            for small in stepped:
                yield small.box.view.frame()[0]

    @property
    def _busy(self) -> bool:
        return not self._net.quiet or any(small.core.has_work or hub.busy
                                          for small, hub in zip(self._small, self._hubs, strict=True))

    def _step(self, small: _Small) -> bool:
        """False where the engine had nothing to do, or waits for KV."""
        small.executor.seconds, sent = 0.0, self._net.num_messages
        updates = small.core.step(wait_for_kv=False)
        small.free_at = self._now + small.executor.seconds
        self._net.hold_back(self._small.index(small), sent, small.free_at)
        for update in updates:
            if update.new_tokens:
                name = f"{update.request.request_id}.{update.sequence.index}"
                small.box.note(name, update.request, small.free_at)
        return small.executor.seconds > 0

    def summaries(self) -> list[dict[str, Any]]:
        return [small.box.summary(self._now) for small in self._small]


def _travel_seconds(job: Range) -> float:
    return _RANGE_SECONDS + _TRAVEL_SECONDS * (job.end - job.start)
