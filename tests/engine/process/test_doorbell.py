"""An engine's loop at rest wakes for a message and for KV that arrives, and for nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from quire.config import EngineConfig
from quire.engine.assembly.engine import build_engine
from quire.engine.process import messages as m
from quire.engine.process.doorbell import Doorbell
from quire.engine.process.main import EngineServer
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import KVCacheManager
from quire.sampling.params import SamplingParams
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import TransferReport


@pytest.fixture
def sockets() -> Iterator[tuple[Any, Any]]:
    context: Any = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://door")
    push.connect("inproc://door")
    yield pull, push
    for socket in (pull, push):
        socket.close(0)
    context.term()


def test_it_hears_both_and_tells_them_apart(sockets: tuple[Any, Any]) -> None:
    pull, push = sockets
    box = ArrivalBox()
    bell = Doorbell(pull, box)
    assert not bell.wait(1)
    threading.Timer(0.05, box.put, [TransferReport(1, 1, True)]).start()
    began = time.monotonic()
    assert not bell.wait(60_000) and time.monotonic() - began < 30.0
    assert [report.number for report in box.take()] == [1]
    began = time.monotonic()
    assert not bell.wait(30) and time.monotonic() - began > 0.02, "an old ring is heard twice"
    push.send(b"news")
    assert bell.wait(60_000)
    for number in range(100_000):  # nobody listens: rings are dropped, not waited for
        box.put(TransferReport(number, 0))
    assert len(box.take()) == 100_000


class SlowTransfers:
    """Stands between a dummy executor and the engine: transfers report a while after their step."""

    def __init__(self, engine: Any, seconds: float) -> None:
        self._inner, self._seconds, self.num_late = engine.core.executor.execute, seconds, 0
        self._arrivals = engine.core.executor.arrivals
        engine.core.executor.execute = self.execute

    def execute(self, plan: Any) -> Any:
        result = self._inner(plan)
        for report in result.arrivals:
            self.num_late += 1
            threading.Timer(self._seconds, self._arrivals.put, [report]).start()
        result.arrivals = []
        return result


def test_an_arrival_wakes_the_loop_of_the_engine_process(
        sockets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.assembly import engine as assembly

    def build_cache(config: Any, spec: Any, pool: Any, cost: Any) -> KVCacheManager:
        return KVCacheManager(8, 4, tiers=[HostTier(64)], eviction_policy="lru")

    monkeypatch.setattr(assembly, "build_cache", build_cache)
    pull, push = sockets
    engine = build_engine(EngineConfig.create(model="smollm2-135m", executor="dummy", num_kv_blocks=8, block_size=4),
                          progress=False, clock=time.monotonic)
    slow = SlowTransfers(engine, 0.2)
    sent: list[Any] = []

    class Outbox:
        state = ("", 0.0, 0)

        def send(self, data: bytes) -> None:
            sent.append(m.decode_from_engine(data))
            for news in getattr(sent[-1], "news", []):
                if news.finish_reason is not None:
                    handle = next(after, None)
                    push.send(m.encode(m.Shutdown() if handle is None else add(handle)))

    def add(handle: int) -> m.Add:
        # The first one's prefix is evicted by the second and comes back for the third.
        prompt = list(range(24)) if handle != 2 else list(range(50, 78))
        body = m.RequestBody(f"r{handle}", prompt, SamplingParams(max_tokens=2, ignore_eos=True), seed=handle,
                             arrival_time=0.0)
        return m.Add(handle, msgspec.Raw(m.encode(body)))

    after = iter([2, 3])
    out: Any = Outbox()
    server = EngineServer(engine, pull, out, out, Doorbell(pull, engine.core.executor.arrivals))
    push.send(m.encode(add(1)))
    loop = threading.Thread(target=server.run, daemon=True)
    began = time.monotonic()
    loop.start()
    loop.join(20.0)
    assert not loop.is_alive() and slow.num_late >= 2
    assert engine.core.scheduler.stats.fetches == 1 and time.monotonic() - began < 5.0
    assert engine.core.scheduler.stats.steps < 40, "the loop polls"
