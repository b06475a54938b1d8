"""Who is preempted, why, and what becomes of its memory; fairness among tenants."""

from __future__ import annotations

import random

import pytest

from quire.errors import InvalidRequestError
from quire.kvcache.move_cost import MoveCost
from quire.scheduler.plan import StepPlan
from quire.scheduler.request import Request, Status
from tests.scheduler.simulation import SimulatedWorker, expected_tokens, make_request, make_scheduler

CHEAP_MOVES = MoveCost(tokens_per_second=1.0, bytes_per_second=1e9)
DEAR_MOVES = MoveCost(tokens_per_second=1e9, bytes_per_second=1.0)


class Engine:
    def __init__(self, **options: object) -> None:
        self.scheduler = make_scheduler(**options)  # type: ignore[arg-type]
        self.worker = SimulatedWorker.beside(self.scheduler)
        self.plans: list[StepPlan] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        result = self.worker.execute(plan)
        self.worker.retire(plan.step)
        self.scheduler.update(result)
        self.scheduler.check()
        return plan

    def drain(self) -> None:
        while self.scheduler.running or self.scheduler.arriving or len(self.scheduler.waiting):
            self.step()


def crowd(count: int, tokens: int = 12, **options: object) -> list[Request]:
    return [make_request(f"r{i}", [100 * i + j for j in range(5)], tokens, **options)  # type: ignore[arg-type]
            for i in range(count)]


@pytest.mark.parametrize(("mode", "cost", "moved"), [
    ("swap", None, True), ("recompute", CHEAP_MOVES, False), ("auto", CHEAP_MOVES, True),
    ("auto", DEAR_MOVES, False), ("auto", None, False),
])
def test_the_mode_and_the_cost_model_decide_what_becomes_of_preempted_kv(
        mode: str, cost: MoveCost | None, moved: bool) -> None:
    engine = Engine(num_blocks=8, block_size=4, host_blocks=40, mode=mode, cost=cost, caching=False)
    requests = crowd(3, 14)
    engine.add(*requests)
    engine.drain()
    stats = engine.scheduler.stats
    assert stats.preemptions > 0 and stats.preemptions == stats.preemptions_for_memory
    assert (stats.preemptions_by_swap > 0) == moved
    assert (stats.recomputed_tokens == 0) == moved
    swapper = engine.scheduler.preemption.swapper
    assert swapper is not None
    assert swapper.stats.out == swapper.stats.back == stats.preemptions_by_swap
    assert swapper.stats.bytes_out == 100 * swapper.stats.blocks_out == swapper.stats.bytes_in
    for request in requests:
        assert request.sequences[0].tokens[5:] == expected_tokens(request, 99)


def test_a_full_host_tier_falls_back_to_recompute() -> None:
    engine = Engine(num_blocks=8, block_size=4, host_blocks=1, mode="swap", caching=False)
    engine.add(*crowd(3, 14))
    engine.drain()
    stats, swapper = engine.scheduler.stats, engine.scheduler.preemption.swapper
    assert swapper is not None and swapper.stats.full > 0
    assert stats.preemptions_by_recompute > 0 and stats.requests_finished == 3


def test_shared_blocks_of_a_group_are_moved_once() -> None:
    engine = Engine(num_blocks=12, block_size=4, host_blocks=40, mode="swap", caching=False)
    first = make_request("first", list(range(16)), 12)
    group = make_request("group", list(range(50, 66)), 6, n=4)
    engine.add(first, group)
    while not engine.scheduler.stats.preemptions:
        engine.step()
    assert group.status is Status.WAITING and group.swapped is not None
    out = [move for p in engine.plans for t in p.transfers if t.out for move in t.moves]
    assert 4 <= len(out) <= 8 and len({move.device for move in out}) == len(out)
    engine.drain()
    back = [move for p in engine.plans for t in p.transfers if not t.out for move in t.moves]
    assert len(back) == len(out)
    assert group.counts.swaps_out == group.counts.swaps_in == 1
    assert group.counts.swap_bytes == 100 * (len(out) + len(back))
    for seq in group.sequences:
        assert seq.tokens[16:] == expected_tokens(group, 99, seq.index)


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    engine = Engine(num_blocks=8, block_size=4, queue="priority", host_blocks=40, mode="swap", max_num_seqs=2)
    low = [make_request(f"low{i}", [10 * i + j for j in range(5)], 9, priority=5) for i in range(2)]
    engine.add(*low)
    for _ in range(3):
        engine.step()
    urgent = make_request("urgent", list(range(80, 90)), 3, priority=0)
    engine.add(urgent)
    engine.step()
    assert urgent.status is Status.RUNNING
    assert low[1].status is Status.WAITING and low[0].status is Status.RUNNING
    assert low[1].counts.preemptions_for_priority == 1 == engine.scheduler.stats.preemptions_for_priority
    engine.drain()
    for request in [*low, urgent]:
        assert request.sequences[0].tokens[request.num_prompt_tokens :] == expected_tokens(request, 99)


def test_equal_and_lower_priorities_preempt_nobody() -> None:
    for queue in ("priority", "fcfs", "fair"):
        engine = Engine(queue=queue, max_num_seqs=1)
        engine.add(make_request("running", [1, 2, 3], 9, priority=1))
        engine.step()
        engine.add(make_request("equal", [4, 5], 2, priority=1), make_request("lower", [6], 2, priority=2))
        engine.drain()
        assert engine.scheduler.stats.preemptions == 0


def test_a_heavy_tenant_cannot_starve_a_light_one() -> None:
    """The heavy one has 60 requests waiting from the start; the light one's wait has a bound all the same."""
    waits: dict[str, list[int]] = {}
    for queue in ("fair", "fcfs"):
        rng = random.Random(7)
        engine = Engine(queue=queue, num_blocks=400, max_num_seqs=4)
        for i in range(60):
            prompt = [rng.randrange(900) for _ in range(rng.randint(5, 20))]
            engine.add(make_request(f"h{i}", prompt, 16, tenant="heavy"))
        waits[queue] = []
        for turn in range(8 if queue == "fair" else 1):
            for _ in range(6):
                engine.step()
            light = make_request(f"l{turn}", [rng.randrange(900) for _ in range(6)], 4, tenant="light")
            engine.add(light)
            came = len(engine.plans)
            while light.status is Status.WAITING:
                engine.step()
            waits[queue].append(len(engine.plans) - came)
    # Four places of at most 16 steps: one comes free within 17, and it is the light tenant's.
    assert max(waits["fair"]) <= 17
    assert max(waits["fcfs"]) > 100


def test_tenants_share_alike_while_both_wait() -> None:
    engine = Engine(queue="fair", num_blocks=400, max_num_seqs=3)
    for i in range(30):
        engine.add(make_request(f"a{i}", [i, 1, 2], 10, tenant="a"))
    for i in range(30):
        engine.add(make_request(f"b{i}", [i, 3, 4], 10, tenant="b"))
    served = {"a": 0, "b": 0}
    for _ in range(60):
        plan = engine.scheduler.schedule()
        assert plan is not None
        tenants = {seq.row: r.tenant for r in engine.scheduler.running.values() for seq in r.live}
        for entry in plan.entries:
            served[tenants[entry.row]] += entry.num_tokens
        result = engine.worker.execute(plan)
        engine.worker.retire(plan.step)
        engine.scheduler.update(result)
    assert abs(served["a"] - served["b"]) <= 3 * 13


def test_a_group_that_no_pool_holds_is_refused_and_one_without_a_length_is_cut() -> None:
    engine = Engine(num_blocks=8, block_size=4)
    with pytest.raises(InvalidRequestError, match="need 14 KV blocks, and the pool has 8") as caught:
        engine.add(make_request("large", list(range(8)), 10, n=4))
    assert caught.value.field == "max_tokens"
    engine.add(make_request("cut", list(range(8)), None, n=3))
    engine.drain()
    assert engine.scheduler.stats.requests_finished == 1
