"""A small engine to look at: the real scheduler and the real cache, over an executor that only pretends to compute.

What it shows (sharing, chunks, preemption, copies on write) is what the scheduler of the server would do with a pool
and limits of that size; the tokens are made up and the time of a step is a formula.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from quire.engine.watch.view import EngineView
from quire.executor.base import RankFacts
from quire.executor.dummy import DummyExecutor
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import KVCacheManager
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.policy import BATCHING_POLICIES
from quire.scheduler.preemption import Preemption, PreemptionMode
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler
from quire.server.view.sandbox_drafts import ForeseenSource
from quire.speculation.speculator import LookupSpeculator
from quire.speculation.tree import TreeShape
from quire.worker.memory import PoolSize

BLOCK_SIZE = 16
_STEP_SECONDS = 0.05
_TOKEN_SECONDS = 0.0015
_COPY_SECONDS = 0.002
_FIRST_OWN = 100_000
"""Tokens of prompts that only one visitor has begin here."""
_VOCABULARY = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """What makes a small engine different from another."""

    title: str
    num_blocks: int = 64
    num_host_blocks: int = 0
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    chunked_prefill: bool = True
    batching_policy: str = "decode-first"
    num_stages: int = 1
    """Of a pipeline."""
    steps_in_flight: int = 1
    drafts: int = 0
    """Tokens guessed ahead in every step, of one sequence."""
    right: float = 0.0
    """Chance of each guess to be right, if those before it are."""
    width: int = 1
    """Guesses at one place; more than 1: drafts are trees, each guess after the first right as often as those before it
    leave."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A request that arrives after so many seconds. Prompts with the same `family` begin with the same tokens."""

    at: float
    shared_tokens: int
    own_tokens: int
    max_tokens: int
    n: int = 1
    family: int = 0

    def prompt(self, number: int) -> list[int]:
        common = [1000 * (self.family + 1) + i for i in range(self.shared_tokens)]
        return common + [_FIRST_OWN + 1000 * number + i for i in range(self.own_tokens)]

    def request(self, number: int) -> Request:
        params = SamplingParams(max_tokens=self.max_tokens, n=self.n, temperature=1.0, ignore_eos=True)
        return Request(str(number), self.prompt(number), params, seed=number, arrival_time=self.at)


def step_seconds(plan: StepPlan) -> float:
    """How long a step pretends to take."""
    return _STEP_SECONDS + _TOKEN_SECONDS * plan.num_tokens + _COPY_SECONDS * len(plan.copies)


def _speculator(layout: Layout) -> LookupSpeculator | None:
    if not layout.drafts:
        return None
    source = ForeseenSource(_FIRST_OWN, _VOCABULARY, layout.right)
    if layout.width == 1:
        return LookupSpeculator(source, layout.drafts, adaptive=False)
    depth = layout.drafts // layout.width
    return LookupSpeculator(source, depth, adaptive=False, tree=TreeShape(layout.width, depth, layout.drafts))


class Pipeline:
    """Stages that share the time of a step evenly; each has one step at a time."""

    def __init__(self, num_stages: int) -> None:
        self._times: list[deque[tuple[int, float, float]]] = [deque(maxlen=64) for _ in range(num_stages)]
        self._steps = 0

    def run(self, step: int, now: float, seconds: float) -> float:
        """A step that is handed in now and takes so long in all; when its result comes."""
        self._steps += 1
        at = now
        for stage in self._times:
            began = max(at, stage[-1][2] if stage else 0.0)
            at = began + seconds / len(self._times)
            stage.append((step, began, at))
        return at

    def describe(self) -> list[RankFacts]:
        if len(self._times) == 1:
            return []
        return [RankFacts(stage, stage, 0, 0, self._steps, 1.0, 0.0, tuple(times))
                for stage, times in enumerate(self._times)]


class Sandbox:
    """One small engine; `frames` runs it through a list of visitors, in time with the clock on the wall."""

    def __init__(self, layout: Layout, place: int, speed: float, clock: Callable[[], float] | None = None) -> None:
        """`clock` where somebody else drives it, beside another engine."""
        self._layout, self._speed = layout, speed
        self._now = 0.0
        clock = self._clock if clock is None else clock
        tiers = [HostTier(layout.num_host_blocks, offload=False)] if layout.num_host_blocks else []
        cache = KVCacheManager(layout.num_blocks, BLOCK_SIZE, tiers=tiers, block_bytes=(1,))
        mode = PreemptionMode.SWAP if tiers else PreemptionMode.RECOMPUTE
        self.scheduler = Scheduler(
            Limits(layout.max_num_seqs, layout.max_num_batched_tokens, layout.num_blocks * BLOCK_SIZE,
                   layout.chunked_prefill, num_stages=min(layout.num_stages, layout.steps_in_flight)),
            cache, policy=BATCHING_POLICIES[layout.batching_policy](), clock=clock,
            preemption=Preemption(cache, mode), speculator=_speculator(layout))
        self.executor = DummyExecutor(_VOCABULARY)
        self._pipeline = Pipeline(layout.num_stages)
        self._in_flight: deque[tuple[StepResult, float]] = deque()
        """Results, and when they come."""
        self.view = EngineView(self.scheduler, PoolSize(layout.num_blocks, layout.num_blocks * BLOCK_SIZE, 1,
                                                         layout.num_host_blocks),
                                layout.title, engine=place, simulated=True, clock=clock,
                                ranks=self._pipeline.describe)
        self._last: dict[str, float] = {}
        self._gaps: list[float] = []
        self._waits: list[float] = []

    def _clock(self) -> float:
        """The time of the story, which does not depend on how fast it is told."""
        return self._now

    async def frames(self, visitors: tuple[Visitor, ...]) -> AsyncIterator[bytes]:
        """One frame for each step, until everybody is served."""
        began = time.monotonic()
        coming = sorted(enumerate(visitors), key=lambda pair: pair[1].at)
        yield self.view.frame()[0]
        while coming or self.scheduler.has_work:
            while coming and coming[0][1].at <= self._now:
                self._let_in(*coming.pop(0))
            if self.scheduler.has_work:
                self._step()
            else:
                self._now = coming[0][1].at
            await asyncio.sleep(max(0.0, began + self._now / self._speed - time.monotonic()))
            yield self.view.frame()[0]

    def _let_in(self, number: int, visitor: Visitor) -> None:
        self.scheduler.add(visitor.request(number))

    def _step(self) -> None:
        while len(self._in_flight) < self._layout.steps_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.view.submitted(plan)
            ends = self._pipeline.run(plan.step, self._now, step_seconds(plan))
            self._in_flight.append((self.executor.execute(plan), ends))
        if not self._in_flight:
            self.scheduler.fail_stuck()
            return
        result, ended = self._in_flight.popleft()
        self._now = max(self._now, ended)
        self.scheduler.update(result)
        self.view.collected()
        for update in self.scheduler.take_updates():
            if update.new_tokens:
                self.note(f"{update.request.request_id}.{update.sequence.index}", update.request, self._now)

    def note(self, name: str, request: Request, now: float) -> None:
        """A sequence has got a token."""
        if name in self._last:
            self._gaps.append(now - self._last[name])
        else:
            self._waits.append(now - request.arrival_time)
        self._last[name] = now

    def summaries(self) -> list[dict[str, Any]]:
        return [self.summary(self._now)]

    def summary(self, now: float) -> dict[str, Any]:
        """What became of it. Seconds are those of the story."""
        stats, cache, seconds = self.scheduler.stats, self.scheduler.cache.stats, max(1e-9, now)
        return {
            "title": self._layout.title, "seconds": round(seconds, 2),
            "output_tok_s": round(stats.output_tokens / seconds, 1),
            "mean_first_token_s": round(sum(self._waits) / max(1, len(self._waits)), 2),
            "longest_gap_s": round(max(self._gaps, default=0.0), 2),
            "prompt_tokens_computed": stats.prompt_tokens, "tokens_from_cache": cache.prefix_hit_tokens,
            "preemptions": stats.preemptions, "tokens_computed_again": stats.recomputed_tokens,
            "blocks_moved": 0 if self.scheduler.preemption.swapper is None
            else self.scheduler.preemption.swapper.stats.blocks_out,
            "copies_on_write": cache.copies_on_write,
        }
