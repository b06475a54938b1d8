"""An engine on a GPU put together by hand, timed: what `quire bench gpu` and the GPU smoke test drive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from quire.bench.gpu.timeline import StepSpan
from quire.config import CacheConfig, EngineConfig
from quire.engine.assembly.engine import Engine
from quire.engine.core import EngineCore
from quire.executor.device import DeviceExecutor
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.llm import LLM
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler
from quire.scheduler.updates import SequenceUpdate
from quire.speculation.speculator import Speculator
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.worker import GpuWorker


@dataclass(slots=True)
class Run:
    """What one workload took: seconds, and where the host's time went."""

    seconds: float
    first_token: float
    """Seconds until every request had its first token."""
    prompt_tokens: int
    output_tokens: int
    steps: int
    plan_seconds: float
    """Host time in planning, launching and taking results in: all but waiting."""
    tokens: list[list[int]] = field(default_factory=list)
    core_seconds: float = 0.0
    """From the core's first step to its last; the rest is the host before, after and around it."""
    before_core: float = 0.0
    """Until the first step."""


class TimedCore(EngineCore):
    """An engine core that counts the seconds it spends waiting for results."""

    waited = 0.0
    began: float | None = None
    """When the first step was begun, since the last call of `reset`."""
    ended = 0.0
    last_first_token = 0.0
    """When the last request had its first token."""

    def reset(self) -> None:
        self.waited, self.began = 0.0, None

    def launch(self) -> None:
        if self.began is None:
            self.began = time.perf_counter()
        super().launch()

    def step(self, wait_for_kv: bool = True) -> list[SequenceUpdate]:
        if self.began is None:
            self.began = time.perf_counter()
        updates = super().step(wait_for_kv)
        self.ended = time.perf_counter()
        if any(update.new_tokens and update.sequence.num_output_tokens == len(update.new_tokens) for update in updates):
            self.last_first_token = self.ended
        return updates

    def _collect(self) -> None:
        begin = time.perf_counter()
        self._futures[0].exception()
        self.waited += time.perf_counter() - begin
        super()._collect()


class GpuClock:
    """How long the GPU worked for the steps launched inside: from the start of each one's launches to their end.

    Exact where a step is a replayed graph; a step launched kernel by kernel counts its gaps as work too.
    """

    def __init__(self, worker: GpuWorker) -> None:
        self._worker = worker
        self._spans: list[tuple[Any, Any, float, float]] = []
        self._zero: Any = None
        self._began = 0.0

    def __enter__(self) -> GpuClock:
        import torch

        runner: Any = self._worker._runner
        launch = runner.run
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._began = time.perf_counter()

        def timed(plan: Any) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started = time.perf_counter()
            begin.record()
            pending = launch(plan)
            end.record()
            self._spans.append((begin, end, started, time.perf_counter()))
            return pending

        runner.run = timed
        return self

    def __exit__(self, *exc: object) -> None:
        runner: Any = self._worker._runner
        del runner.run

    def seconds(self) -> float:
        """Waits for the last of them."""
        if self._spans:
            self._spans[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end, *_ in self._spans) / 1e3

    def spans(self) -> list[StepSpan]:
        """Every step on one clock, good to some microseconds; call `seconds` first, which waits."""
        return [
            StepSpan(1e3 * (started - self._began), 1e3 * (done - self._began),
                     self._zero.elapsed_time(begin), self._zero.elapsed_time(end))
            for begin, end, started, done in self._spans
        ]


def build_worker(
    config: dict[str, Any], options: DeviceOptions, block_size: int = 16, num_kv_blocks: int | None = None
) -> GpuWorker:
    return GpuWorker(config, None, CacheConfig(block_size=block_size, num_kv_blocks=num_kv_blocks), options)


def build_core(
    worker: GpuWorker,
    options: DeviceOptions,
    *,
    block_size: int = 16,
    depth: int = 2,
    prefix_caching: bool = False,
    partial_prefills: int = 1,
    speculator: Speculator | None = None,
) -> TimedCore:
    """A fresh scheduler and cache over a worker; a worker may be given a new core when the old one is idle."""
    cache = KVCacheManager(
        worker.pool.num_blocks,
        block_size,
        groups=tuple(GroupWindow(g.window) for g in worker.spec.cache_groups()),
        prefix_caching=prefix_caching,
    )
    limits = Limits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        worker.pool.max_model_len,
        max_num_partial_prefills=partial_prefills,
    )
    return TimedCore(Scheduler(limits, cache, speculator=speculator), DeviceExecutor(worker), depth)


def front_door(core: EngineCore, worker: GpuWorker) -> LLM:
    """`LLM` over such an engine, as users call it."""
    source: Any = SimpleNamespace(eos_token_ids=())
    return LLM.over(Engine(EngineConfig.create(skip_tokenizer_init=True), source, worker.spec, worker.pool, core))


def generate(llm: LLM, core: TimedCore, requests: Sequence[Request], keep_tokens: bool = False) -> Run:
    """The same requests through `LLM.generate`, timed from outside."""
    core.reset()
    steps = core.scheduler.stats.steps
    prompts = [request.prompt_token_ids for request in requests]
    params = [replace(request.params, seed=request.seed) for request in requests]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    errors = [output.error for output in outputs if output.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return Run(
        seconds,
        core.last_first_token - begin,
        sum(map(len, prompts)),
        sum(map(len, tokens)),
        core.scheduler.stats.steps - steps,
        seconds - core.waited,
        tokens if keep_tokens else [],
        core.ended - (core.began or core.ended),
        (core.began or begin) - begin,
    )


def run_requests(core: TimedCore, requests: Sequence[Request], keep_tokens: bool = False) -> Run:
    """Give all requests at once and step until they are done."""
    core.reset()
    steps = core.scheduler.stats.steps
    begin = time.perf_counter()
    for request in requests:
        core.add(request)
    missing = len(requests)
    first = 0.0
    while core.has_work:
        for update in core.step():
            if missing and update.new_tokens and update.sequence.num_output_tokens == len(update.new_tokens):
                missing -= 1
                first = time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    errors = [r.sequences[0].error for r in requests if r.sequences[0].error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    return Run(
        seconds,
        first,
        sum(len(r.prompt_token_ids) for r in requests),
        sum(r.sequences[0].num_output_tokens for r in requests),
        core.scheduler.stats.steps - steps,
        seconds - core.waited,
        [r.sequences[0].tokens[r.sequences[0].num_prompt_tokens :] for r in requests] if keep_tokens else [],
        seconds,
    )
