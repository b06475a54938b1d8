"""Several engines in simulated time, with a pool of KV between them or without: real schedulers, caches and tiers.

Only what a model and a network would take is made up: a step costs a base and its prompt tokens over the rate of
prefill, a fetch its bytes over the network, one after the other on each engine's link.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import InvalidRequestError
from quire.executor.dummy import DummyExecutor
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.move_cost import MoveCost
from quire.kvpool.benefit import Network
from quire.kvpool.keys import UNIT_TOKENS, UnitKeys
from quire.kvpool.memory import MemoryStore
from quire.kvpool.publishing import BenefitPublisher
from quire.kvpool.rates import StoreRate
from quire.kvpool.staging import Staging, UnitWriter
from quire.kvpool.tier import UnitTier
from quire.kvpool.unit import HEADER_BYTES
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import StepPlan, TransferReport
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler

_TRACE_BLOCK = 512
_BLOCK_SIZE = 64
_VOCABULARY = 50_000
_COPY_RATE = 1e10
"""Bytes a second between a device and its own host."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at: float
    prompt: list[int]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines that are all alike, and what lies between them."""

    replicas: int = 4
    device_tokens: int = 512_000
    """Tokens of KV that each engine holds on its device."""
    pool_tokens: int = 5_000_000
    """Tokens of KV in the pool; 0: there is none."""
    bytes_per_token: int = 131_072
    prefill_rate: float = 8000.0
    step_seconds: float = 0.02
    network: Network = field(default_factory=lambda: Network(100.0))
    policy: str = "benefit"
    output_tokens: int = 16


@dataclass(slots=True)
class FleetResult:
    """What came of a trace."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    pool_tokens: int = 0
    """Of `hit_tokens`, those that came from the pool."""
    units_written: int = 0
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from each arrival."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_first_token(self) -> float:
        return sum(self.first_tokens) / len(self.first_tokens) if self.first_tokens else 0.0

    def quantile(self, share: float) -> float:
        times = sorted(self.first_tokens)
        return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def read_arrivals(path: Path, limit: int, scale: int, speed: float) -> list[Arrival]:
    """Requests of a trace in Mooncake's format. Each block of 512 tokens becomes 512 / scale; they come `speed` times
    as fast."""
    arrivals: list[Arrival] = []
    try:
        with path.open("rb") as lines:
            for line in itertools.islice(lines, limit):
                data = json.loads(line)
                length = max(1, int(data["input_length"]) // scale)
                prompt = [token for number in data["hash_ids"] for token in _tokens(int(number), _TRACE_BLOCK // scale)]
                arrivals.append(Arrival(float(data["timestamp"]) / 1e3 / speed, prompt[:length] or [1]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"cannot read the trace {path}: {error}", "trace") from error
    return arrivals


def _tokens(number: int, count: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(_VOCABULARY) for _ in range(count)]


class _InlineWriter(UnitWriter):
    """Writes at once: in simulated time there are no threads."""

    def put(self, name: bytes) -> None:
        self._write(name)
        self._staging.drop(name)


class _Replica:
    """One engine. `events` of the fleet bring it requests, ends of steps and arrivals of KV."""

    def __init__(self, fleet: Fleet, now: list[float], pool: MemoryStore | None, longest: int) -> None:
        self.fleet = fleet
        unit_bytes = fleet.bytes_per_token * UNIT_TOKENS
        self.tier: UnitTier | None = None
        cost = MoveCost(fleet.prefill_rate, _COPY_RATE)
        if pool is not None:
            keys, staging = UnitKeys(b"a fleet in simulated time", b"model"), Staging(1 << 40)
            rate = StoreRate(fleet.network.bytes_per_second, fleet.network.seconds(0))
            publisher = BenefitPublisher(1 << 16, None if fleet.policy == "all" else cost.recompute)
            publisher.reuse.remember(max(256, 2 * fleet.pool_tokens // UNIT_TOKENS))
            # Units have no content here; what they would weigh is what the decisions go by.
            self.tier = UnitTier("pool", pool, keys, _BLOCK_SIZE, [0], staging, publisher, rate=rate,
                                 writer=_InlineWriter(pool, staging, keys.check_seed, StoreRate(), lambda: None),
                                 decides_by=[unit_bytes], always=fleet.policy == "all")
        self.cache = KVCacheManager(fleet.device_tokens // _BLOCK_SIZE, _BLOCK_SIZE, secret=b"the same for all",
                                    tiers=[] if self.tier is None else [self.tier], cost=cost,
                                    block_bytes=(fleet.bytes_per_token * _BLOCK_SIZE,), eviction_policy="reuse-rate")
        self.scheduler = Scheduler(Limits(64, 2048, longest + fleet.output_tokens + 1), self.cache,
                                   clock=lambda: now[0])
        self.executor = DummyExecutor(_VOCABULARY)
        self.plan: StepPlan | None = None
        self.link_free = 0.0

    def begin_step(self, now: float) -> tuple[float | None, list[tuple[float, TransferReport]]]:
        """When the step that begins now ends, if one does, and when what it transfers has arrived."""
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            return None, []
        prefill = sum(entry.num_tokens for entry in self.plan.entries if entry.num_tokens > 1)
        ends = now + prefill / self.fleet.prefill_rate + (self.fleet.step_seconds if self.plan.entries else 0.0)
        reports = []
        for start in self.plan.transfers:
            num_bytes = len(start.moves) * self.cache.block_bytes[0]
            if start.out:
                done = now + num_bytes / _COPY_RATE
            else:
                done = self.link_free = max(now, self.link_free) + self.fleet.network.seconds(num_bytes)
            reports.append((done, TransferReport(start.number, len(start.moves), finished=True)))
        return ends, reports

    def end_step(self) -> list[Request]:
        """Requests that got their first token."""
        plan, self.plan = self.plan, None
        if plan is None:
            return []
        result = self.executor.execute(plan)
        result.arrivals = []
        self.scheduler.update(result)
        return [update.request for update in self.scheduler.take_updates()
                if update.new_tokens and update.sequence.num_output_tokens == len(update.new_tokens)]


def run_fleet(fleet: Fleet, arrivals: Sequence[Arrival]) -> FleetResult:
    """Requests go round the replicas in turn, as they come."""
    now = [0.0]
    pool = MemoryStore(fleet.pool_tokens // UNIT_TOKENS * HEADER_BYTES) if fleet.pool_tokens else None
    longest = max(len(arrival.prompt) for arrival in arrivals)
    replicas = [_Replica(fleet, now, pool, longest) for _ in range(fleet.replicas)]
    order = itertools.count()
    events: list[tuple[float, int, int, object]] = []
    params = SamplingParams(max_tokens=fleet.output_tokens, ignore_eos=True)
    for number, arrival in enumerate(arrivals):
        request = Request(f"r{number}", arrival.prompt, params, seed=number, arrival_time=arrival.at)
        heapq.heappush(events, (arrival.at, next(order), number % fleet.replicas, request))
    result = FleetResult()
    while events:
        now[0], _, index, what = heapq.heappop(events)
        replica = replicas[index]
        if isinstance(what, Request):
            replica.scheduler.add(what)
        elif isinstance(what, TransferReport):
            replica.scheduler.arrived([what])
        else:
            for request in replica.end_step():
                _count(result, request, now[0])
        if replica.plan is None:
            ends, reports = replica.begin_step(now[0])
            if ends is not None:
                heapq.heappush(events, (ends, next(order), index, None))
            for at, report in reports:
                heapq.heappush(events, (at, next(order), index, report))
    result.units_written = 0 if pool is None else pool.stats.units_written
    return result


def _count(result: FleetResult, request: Request, now: float) -> None:
    result.requests += 1
    result.prompt_tokens += len(request.prompt_token_ids)
    result.hit_tokens += request.num_cached_tokens or 0
    result.pool_tokens += request.counts.tier_hit_tokens
    result.first_tokens.append(now - request.arrival_time)
