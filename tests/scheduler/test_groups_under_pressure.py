"""Random loads of single samples, groups and beams in small pools: each gets its tokens, and nothing leaks."""

from __future__ import annotations

import random
from collections import deque

import pytest

from quire.errors import InvalidRequestError
from quire.kvcache.move_cost import MoveCost
from quire.sampling.params import BeamSearchParams
from quire.sampling.token_logprobs import unpack_all
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.request import FinishReason, Request, Status
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import (
    SimulatedWorker,
    expected_beams,
    expected_tokens,
    make_request,
    make_scheduler,
)


class Load:
    """One random engine with random requests, driven as the core does."""

    def __init__(self, seed: int, **options: object) -> None:
        self.rng = rng = random.Random(seed)
        wanted: dict[str, object] = {
            "num_blocks": rng.choice([8, 10, 12, 16, 24]),
            "block_size": rng.choice([1, 2, 3, 4]),
            "windows": rng.choice([(None,), (None,), (None,), (3,), (None, 4)]),
            "queue": rng.choice(["fcfs", "priority", "fair"]),
            "policy": rng.choice(["decode-first", "decode-first", "prefill-first"]),
            "caching": rng.random() < 0.7,
            "host_blocks": rng.choice([0, 3, 20, 60]),
            "mode": rng.choice(["auto", "recompute", "swap"]),
            "offload": rng.random() < 0.5,
            "cost": rng.choice([None, MoveCost(1.0, 1e9), MoveCost(1e9, 1.0), MoveCost(100.0, 2000.0)]),
            "max_num_seqs": rng.choice([2, 4, 6, 9]),
            "max_num_batched_tokens": rng.choice([1, 3, 8, 24]),
            "max_num_partial_prefills": rng.choice([1, 2]),
            "long_prefill_token_threshold": rng.choice([0, 0, 3]),
        }
        self.scheduler: Scheduler = make_scheduler(**(wanted | options))  # type: ignore[arg-type]
        self.depth = rng.choice([1, 1, 2, 3])
        self.worker = SimulatedWorker.beside(self.scheduler)
        if random.Random(f"{seed} transfers").random() < 0.5:
            self.worker.chance, self.worker.failing = random.Random(seed), random.Random(seed).choice([0.0, 0.1, 0.5])
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.prompt_logprobs: dict[str, list[tuple[float, int]]] = {}

    def come(self) -> None:
        rng, size = self.rng, self.scheduler.cache.block_size
        name, seed = f"r{len(self.requests)}", 1000 + len(self.requests)
        prompt = [0] * rng.choice([0, 2, 5, size * 2]) + [rng.randrange(2) for _ in range(rng.randint(1, 5))]
        prompt = prompt[: self.scheduler.cache.max_tokens - 2]
        max_tokens = rng.choice([1, 4, 9, 15])
        kind = rng.choice(["one", "one", "many", "best", "beams"])
        beams, n, best_of = None, 1, None
        if kind == "many":
            n = rng.randint(2, 4)
        elif kind == "best":
            n, best_of = 1, rng.randint(2, 4)
        elif kind == "beams":
            beams = BeamSearchParams(beam_width=rng.randint(1, 4), max_tokens=max_tokens,
                                     early_stopping=rng.choice([True, False, "never"]),
                                     length_penalty=rng.choice([1.0, 0.0, 2.0]))
        request = make_request(
            name, prompt, max_tokens, seed=seed, beams=beams, n=n, best_of=best_of,
            priority=rng.randint(0, 2) if rng.random() < 0.5 else 0, tenant=rng.choice("ab"),
            eos=frozenset(rng.sample(range(1000), 40 if beams is None else 3)),
            prompt_logprobs=rng.choice([None, None, None, 1]))
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            assert request.width > 1, "only a group can be too large here"
            return
        self.requests.append(request)

    def living(self) -> list[Request]:
        return [request for request in self.requests if request.status is not Status.FINISHED]

    def step(self, lose: bool = False) -> None:
        while len(self.in_flight) < self.depth:
            plan = self.scheduler.schedule()
            self.scheduler.check()
            if plan is None:
                waits = self.in_flight or self.worker.moving
                assert waits or not self.living(), "requests wait and nothing is planned for them"
                break
            self.within_limits(plan)
            if lose and not self.in_flight:
                self.lose(plan)
                return
            self.in_flight.append((plan, self.worker.execute(plan)))
        if self.in_flight:
            plan, result = self.in_flight.popleft()
            self.worker.retire(plan.step)
            self.scheduler.update(result)
        else:
            self.scheduler.arrived(self.worker.advance())
        self.take_news()

    def lose(self, plan: StepPlan) -> None:
        """The step never happens; the worker hears no more of it than which rows are free."""
        for row in plan.freed_rows:
            self.worker.rows.pop(row, None)
        names = {seq.row: r.request_id for r in self.scheduler.running.values() for seq in r.live}
        self.failed |= {names[entry.row] for entry in plan.entries}
        self.scheduler.fail_step("the step was lost")
        self.scheduler.never_started(plan)
        self.take_news()

    def take_news(self) -> None:
        for update in self.scheduler.take_updates():
            name = update.request.request_id
            self.outputs.setdefault((name, update.sequence.index), []).extend(update.new_tokens)
            self.prompt_logprobs.setdefault(name, []).extend(
                (-found.logprob, found.token_id) for found in unpack_all(update.prompt_logprobs or []))
            assert (update.sequence.error is None) == (name not in self.failed), update.sequence.error

    def within_limits(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        rows = [seq.row for r in self.scheduler.running.values() for seq in r.live if seq.row >= 0]
        assert len(set(rows)) == len(rows) <= limits.max_num_seqs
        assert plan.entries or plan.copies or plan.transfers or plan.cancels

    def finish(self) -> None:
        bound = 200 + 20 * sum(r.max_len * r.width for r in self.requests) * self.depth
        for _ in range(bound):
            if not self.living() and not self.in_flight:
                break
            self.step()
            self.scheduler.check()
        assert not self.living(), "a request starves"
        self.scheduler.arrived(self.worker.advance(most=True))
        assert self.scheduler.stats.invariant_errors == 0
        assert all(pool.num_used == 0 for pool in self.scheduler.cache.pools), "blocks leaked"
        assert all(tier.num_used == 0 for tier in self.scheduler.cache.tiers), "host blocks leaked"
        assert not self.scheduler.has_work
        for request in self.requests:
            self.has_its_tokens(request)

    def has_its_tokens(self, request: Request) -> None:
        name, prompt = request.request_id, len(request.prompt_token_ids)
        ended = name in self.aborted or name in self.failed
        if request.params.prompt_logprobs is not None and not ended:
            assert self.prompt_logprobs[name] == list(enumerate(request.prompt_token_ids[1:])), "not once each"
        if request.beams is not None:
            if not ended:
                found = [self.outputs[name, index] for index in range(request.width)]
                assert found == expected_beams(request)
                scores = [seq.score or 0.0 for seq in request.sequences]
                assert scores == sorted(scores, reverse=True)
            return
        for seq in request.sequences:
            found = self.outputs.get((name, seq.index), [])
            expected = expected_tokens(request, request.max_len, seq.index)
            assert found == seq.tokens[prompt:]
            assert found == (expected[: len(found)] if ended else expected)
            if not ended:
                assert seq.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("part", range(8))
def test_every_request_gets_its_tokens_whatever_happens_to_its_memory(part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        load = Load(seed)
        for _ in range(load.rng.randint(3, 12)):
            load.come()
            for _ in range(load.rng.randint(0, 4)):
                load.step()
            if load.living() and load.rng.random() < 0.1:
                request = load.rng.choice(load.living())
                load.aborted.add(request.request_id)
                assert load.scheduler.abort(request.request_id)
                load.take_news()
        load.finish()


def test_a_lost_step_ends_those_in_it_and_harms_nobody_else() -> None:
    for seed in range(150):
        load = Load(seed + 5000, host_blocks=20, mode="swap")
        load.depth = 1
        for _ in range(6):
            load.come()
        for _ in range(20):
            load.step(lose=load.rng.random() < 0.1)
            load.scheduler.check()
        load.finish()


def test_a_group_preempted_while_it_forks_computes_its_prompt_once() -> None:
    """Two chunks are in flight and the siblings were seated in this very draft: only the leader's KV is kept."""
    load = Load(0, num_blocks=10, block_size=2, windows=(None,), queue="priority", policy="decode-first", caching=False,
                host_blocks=40, mode="swap", offload=False, max_num_seqs=9, max_num_batched_tokens=24,
                long_prefill_token_threshold=4)
    scheduler, load.depth = load.scheduler, 2
    group = make_request("group", list(range(1, 12)), 2, n=2, seed=1, prompt_logprobs=1)
    load.requests.append(group)
    scheduler.add(group)
    plans = [scheduler.schedule(), scheduler.schedule()]
    load.in_flight.extend((plan, load.worker.execute(plan)) for plan in plans if plan is not None)
    assert [plan.entries[0].start for plan in plans if plan is not None] == [0, 4]
    urgent = make_request("urgent", [9] * 14, 3, seed=2, priority=-1)
    load.requests.append(urgent)
    scheduler.add(urgent)
    load.step()
    load.step()
    assert group.counts.swaps_out == 1
    load.finish()
    assert scheduler.stats.prompt_tokens <= 14 + 11 + 7, "siblings computed the prompt again"


def test_half_a_prompt_comes_back_only_when_the_rest_of_it_fits() -> None:
    load = Load(0, num_blocks=16, block_size=2, windows=(None,), queue="priority", policy="decode-first", caching=False,
                host_blocks=40, mode="swap", offload=False, max_num_seqs=9, max_num_batched_tokens=12,
                max_num_partial_prefills=2, long_prefill_token_threshold=8)
    load.depth = 1
    for name, length, tokens, priority in (("short", 8, 1, 0), ("long", 21, 2, 0), ("urgent", 22, 8, -1)):
        request = make_request(name, list(range(length)), tokens, seed=length, priority=priority)
        load.requests.append(request)
        load.scheduler.add(request)
        if name == "long":
            load.step()
    load.finish()
    assert load.requests[1].counts.swaps_out == 1, "moved out and back without getting anywhere"
