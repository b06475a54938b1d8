"""The table of sampling settings: shares of temperature alone, and the front door over a core put together by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.bench.gpu import sampling as gpu_sampling
from quire.bench.gpu.engine import TimedCore, front_door, generate
from quire.executor.dummy import DummyExecutor
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.scheduler.scheduler import Limits, Scheduler
from quire.worker.memory import PoolSize


def test_shares_are_of_temperature_alone_and_compared_with_the_targets() -> None:
    figures = {name: [100.0, 90.0, 110.0] for name in gpu_sampling.SETTINGS}
    figures["top_p 0.95"] = [94.0]
    figures["logprobs 5"] = [70.0]
    times = {name: {"gpu_ms_per_step": 4.5, "host_ms_per_step": 2.0, "lead_ms": 1.25} for name in figures}
    lines = {line["setting"]: line for line in gpu_sampling.lines_of("0.6b", 256, figures, times)}
    assert lines["top_p 0.95"]["of_plain"] == 0.94 and lines["top_p 0.95"]["met"]
    assert not lines["logprobs 5"]["met"] and lines["greedy"]["target"] is None
    one = {line["setting"]: line for line in gpu_sampling.lines_of("0.6b", 1, figures | {"greedy": [120.0]}, times)}
    assert one["top_p 0.95"]["met"] and not one["greedy"]["met"]
    assert "missed: 1.1" in gpu_sampling.text(one["greedy"])
    assert "GPU 4.50 ms a step, host 2.00, launched 1.25 ahead" in gpu_sampling.text(one["greedy"])


def test_generate_is_timed_from_outside_and_the_core_by_itself() -> None:
    cache = KVCacheManager(512, 16, groups=(GroupWindow(None),), prefix_caching=False)
    core = TimedCore(Scheduler(Limits(8, 512, 1024), cache), DummyExecutor(20000), 2)
    worker: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=20000), pool=PoolSize(512, 1024, 1))
    llm = front_door(core, worker)
    for name in gpu_sampling.SETTINGS:
        requests = gpu_sampling.requests_of(name, 3, 0, max_tokens=5)
        run = generate(llm, core, requests, keep_tokens=True)
        assert run.output_tokens == 15 and run.prompt_tokens == 3 * 128 and [len(t) for t in run.tokens] == [5] * 3
        assert 0 < run.before_core + run.core_seconds <= run.seconds
        assert run.before_core < run.first_token <= run.before_core + run.core_seconds
        assert run.steps >= 5
