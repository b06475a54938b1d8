"""A machine whose steps take as long as a formula says, on a clock that only those steps move."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

from quire.engine.core import EngineCore
from quire.executor.dummy import DummyExecutor
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.pacing import StepPacer
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.policy import BATCHING_POLICIES
from quire.scheduler.scheduler import Limits, Scheduler
from tests.scheduler.simulation import make_request

Cost = Callable[[StepPlan], float]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def linear_cost(fixed: float = 0.02, token: float = 0.003, row: float = 0.001, pair: float = 1e-6) -> Cost:
    """Seconds by tokens, rows drawn and query-key pairs: what the regression assumes."""
    def cost(plan: StepPlan) -> float:
        pairs = sum(e.num_tokens * e.start + e.num_tokens * (e.num_tokens + 1) // 2 for e in plan.entries)
        return fixed + token * plan.num_tokens + row * sum(e.sample for e in plan.entries) + pair * pairs
    return cost


def roofline_cost(read: float = 0.03, token: float = 0.003) -> Cost:
    """Weights are read once however few tokens there are: flat at first, then linear."""
    return lambda plan: max(read, token * plan.num_tokens) + 0.001


def noisy(cost: Cost, seed: int, spread: float = 0.05, outliers: float = 0.0) -> Cost:
    rng = random.Random(seed)

    def disturbed(plan: StepPlan) -> float:
        return cost(plan) * rng.lognormvariate(0.0, spread) * (3.0 if rng.random() < outliers else 1.0)

    return disturbed


class TimedExecutor(DummyExecutor):
    def __init__(self, clock: Clock, cost: Cost) -> None:
        super().__init__()
        self.clock, self.cost = clock, cost
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan)
        self.clock.now += self.cost(plan)
        return super().submit(plan)


@dataclass
class Played:
    """When each request's tokens came."""

    arrivals: dict[str, float]
    tokens: dict[str, list[float]] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def gaps(self, after: float = 0.0) -> list[float]:
        pairs = [pair for times in self.tokens.values() for pair in pairwise(times)]
        return [second - first for first, second in pairs if first >= after]

    def first_token_times(self) -> list[float]:
        return [times[0] - self.arrivals[name] for name, times in self.tokens.items()]

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.tokens.values())


def play(requests: list[tuple[float, int, int]], cost: Cost, bound: float | None = None,
         policy: str = "decode-first", **limits: int | bool) -> Played:
    """Requests as (arrival, prompt tokens, output tokens), through a scheduler on a simulated machine."""
    clock = Clock()
    wanted = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 8192} | limits
    scheduler = Scheduler(
        Limits(**wanted), KVCacheManager(4096, 16), policy=BATCHING_POLICIES[policy](),  # type: ignore[arg-type]
        clock=clock, pacer=None if bound is None else StepPacer(bound, clock))
    executor = TimedExecutor(clock, cost)
    core = EngineCore(scheduler, executor)
    played = Played({f"r{i}": at for i, (at, _, _) in enumerate(requests)}, plans=executor.plans)
    waiting = sorted((at, i, prompt, output) for i, (at, prompt, output) in enumerate(requests))
    while waiting or core.has_work:
        if waiting and not core.has_work:
            clock.now = max(clock.now, waiting[0][0])
        while waiting and waiting[0][0] <= clock.now:
            _, i, prompt, output = waiting.pop(0)
            ids = [(i * 7919 + j) % 997 for j in range(prompt)]
            core.add(make_request(f"r{i}", ids, output, seed=i, ignore_eos=True))
        for update in core.step():
            assert update.sequence.error is None, update.sequence.error
            times = played.tokens.setdefault(update.request.request_id, [])
            times.extend([clock.now] * len(update.new_tokens))
    return played


def workload(seed: int, count: int = 40, rate: float = 0.5, prompts: tuple[int, int] = (50, 800),
             outputs: tuple[int, int] = (20, 120)) -> list[tuple[float, int, int]]:
    rng = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        found.append((at, rng.randint(*prompts), rng.randint(*outputs)))
    return found
