"""`quire bench scheduler --prompts`: what the host adds to a batch of long prompts through `LLM.generate`, by part.

The device is replaced by a clock: it computes one step after another, each for as long, from the moment its numbers are
staged. So the host's work counts only where the device waits for it: until the first step's numbers are there, between
steps, and from the last result until the outputs are returned.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, Final

import torch

from quire.config import EngineConfig
from quire.engine.assembly.engine import Engine
from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.kvcache.manager import KVCacheManager
from quire.llm import LLM
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import EntryResult, StepPlan, StepResult
from quire.scheduler.scheduler import Limits, Scheduler
from quire.worker.gpu.batches import LogitRows, MixedBatch
from quire.worker.gpu.runner import RING, staged_step
from quire.worker.gpu.table import DeviceTable

PARTS: Final = ("prepare", "plan", "stage", "idle", "after")
"""From the call to the first plan, the first plan, the numbers of its step; then what the device waits between steps,
and from the last result to the outputs."""
_BLOCK_SIZE = 16
_STEP_TOKENS = 16384
_VOCAB = 151936
_NUM_BLOCKS = 65536
"""As many as an H200 has for a model of 0.6B: what grows with the pool shows."""


class BusyDevice(Executor):
    """Computes for `step_seconds` what it is given, as a GPU would: `submit` returns when the numbers are staged."""

    def __init__(self, max_num_seqs: int, max_model_len: int, step_seconds: float) -> None:
        self._table = DeviceTable(max_num_seqs, max_model_len, _BLOCK_SIZE, 1, _VOCAB, torch.device("cpu"))
        self._step_seconds = step_seconds
        self._queue: SimpleQueue[tuple[Future[StepResult], float, StepResult] | None] = SimpleQueue()
        self._thread = Thread(target=self._compute, name="quire-bench-device", daemon=True)
        self._thread.start()
        self.reset()

    def reset(self) -> None:
        """Before a batch: the device has nothing to do."""
        self.submitted = self.staged = self.idle = self.ended = 0.0
        self._free_at: float | None = None

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        began = time.perf_counter()
        places, values = self._table.apply(plan)
        batch = MixedBatch.of(plan.entries)
        reads = LogitRows.of(plan.entries, batch)
        staged_step(plan.step % RING, plan.entries, batch, reads, places, values).send(torch.device("cpu"))
        now = time.perf_counter()
        if self._free_at is None:
            self.submitted, self.staged = began, now
        else:
            self.idle += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at or now) + self._step_seconds
        future: Future[StepResult] = Future()
        result = StepResult(plan.step, [EntryResult([1000] if entry.sample else []) for entry in plan.entries])
        self._queue.put((future, self._free_at, result))
        return future

    def _compute(self) -> None:
        while (sent := self._queue.get()) is not None:
            future, until, result = sent
            time.sleep(max(0.0, until - time.perf_counter()))
            if future.set_running_or_notify_cancel():
                self.ended = time.perf_counter()
                future.set_result(result)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10)


class WatchedScheduler(Scheduler):
    """Notes when it began to plan first."""

    began: float | None = None

    def schedule(self) -> StepPlan | None:
        if self.began is None:
            self.began = time.perf_counter()
        return super().schedule()


class Door:
    """`LLM` over such a device."""

    def __init__(self, count: int, length: int, prefix_caching: bool, step_seconds: float) -> None:
        cache = KVCacheManager(_NUM_BLOCKS, _BLOCK_SIZE, prefix_caching=prefix_caching)
        self._scheduler = WatchedScheduler(Limits(count, _STEP_TOKENS, length + 16), cache)
        self._device = BusyDevice(count, length + 16, step_seconds)
        source: Any = SimpleNamespace(eos_token_ids=())
        spec: Any = SimpleNamespace(vocab_size=_VOCAB)
        pool: Any = SimpleNamespace(max_model_len=length + 16)
        core = EngineCore(self._scheduler, self._device, 2)
        self.llm = LLM.over(Engine(EngineConfig.create(skip_tokenizer_init=True), source, spec, pool, core))

    def run(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
        """Seconds of each part of one batch."""
        self._device.reset()
        self._scheduler.began = None
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        done = time.perf_counter()
        if any(output.error for output in outputs):
            raise RuntimeError(f"a request failed: {outputs[0].error}")
        device, planned = self._device, self._scheduler.began or began
        return {
            "prepare": planned - began,
            "plan": device.submitted - planned,
            "stage": device.staged - device.submitted,
            "idle": device.idle,
            "after": done - device.ended,
        }


def measure(
    count: int, length: int, prefix_caching: bool, repeat: int = 20, step_seconds: float = 0.02
) -> dict[str, list[float]]:
    """Microseconds of each part, by round. Every round has other prompts, so that none is cached."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a GPU's copies are not made by threads of the host
    door = Door(count, length, prefix_caching, step_seconds)
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, seed=1)
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    try:
        for round_ in range(repeat + 1):
            prompts = [[(7919 * (round_ * count + i) + 31 * j) % _VOCAB for j in range(length)] for i in range(count)]
            gc.collect()
            times = door.run(prompts, params)
            if round_:
                for part, seconds in times.items():
                    found[part].append(1e6 * seconds)
    finally:
        door.llm.close()
        torch.set_num_threads(threads)
    return found


def lines(count: int, length: int, repeat: int) -> Iterator[dict[str, Any]]:
    for prefix_caching in (False, True):
        found = measure(count, length, prefix_caching, repeat)
        totals = [sum(times) for times in zip(*found.values(), strict=True)]
        yield {
            "bench": "scheduler",
            "case": "prompts",
            "prompts": count,
            "tokens": length,
            "prefix_caching": prefix_caching,
            "rounds": repeat,
            **{f"{part}_us": round(min(times), 1) for part, times in found.items()},
            "total_us": round(min(totals), 1),
            "total_us_median": round(statistics.median(totals), 1),
        }
