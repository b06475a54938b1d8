"""Groups, beams, forks, stops, lost steps and swapping in any order: each gets its tokens, and nothing leaks."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.errors import InvalidRequestError
from quire.kvcache.move_cost import MoveCost
from quire.sampling.params import BeamSearchParams
from quire.sampling.token_logprobs import unpack_all
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.request import FinishReason, Request, Sequence, Status
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import (
    SimulatedWorker,
    expected_beams,
    expected_tokens,
    make_request,
    make_scheduler,
)

COSTS = [None, MoveCost(1.0, 1e9), MoveCost(1e9, 1.0), MoveCost(100.0, 2000.0)]


@st.composite
def schedulers(draw: st.DrawFn) -> Scheduler:
    num_blocks, block_size = draw(st.sampled_from([8, 12, 16, 24])), draw(st.sampled_from([1, 2, 3, 4]))
    windows = draw(st.sampled_from([(None,), (None,), (None,), (3,), (None, 4)]))
    max_num_seqs, step_tokens = draw(st.sampled_from([3, 4, 6, 9])), draw(st.sampled_from([1, 3, 8, 24]))
    window_blocks = None
    if len(windows) > 1:  # the rule of `worker/memory.py`
        window_blocks = min(num_blocks, max_num_seqs * (-(-4 // block_size) + 2) + -(-step_tokens // block_size))
    return make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        windows=windows,
        window_blocks=window_blocks,
        queue=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        policy=draw(st.sampled_from(["decode-first", "prefill-first"])),
        caching=draw(st.sampled_from([True, True, False])),
        host_blocks=draw(st.sampled_from([0, 3, 20, 60])),
        mode=draw(st.sampled_from(["auto", "recompute", "swap"])),
        offload=draw(st.booleans()),
        cost=draw(st.sampled_from(COSTS)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        max_num_partial_prefills=draw(st.integers(1, 2)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 2, 4])),
    )


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    """What a request asks for, but for its place among the others."""
    kind = draw(st.sampled_from(["one", "many", "best", "beams"]))
    tokens = draw(st.sampled_from([1, 3, 6, 12]))
    count = draw(st.integers(2, 4))
    beams = BeamSearchParams(count - 1, tokens, draw(st.sampled_from([1.0, 0.0, 2.0])),
                             draw(st.sampled_from([True, False, "never"]))) if kind == "beams" else None
    return {
        "prompt": [0] * draw(st.sampled_from([0, 2, 5, 9])) + draw(st.lists(st.integers(0, 1), min_size=1, max_size=5)),
        "max_tokens": tokens,
        "eos": frozenset(draw(st.lists(st.integers(0, 999), max_size=40 if beams is None else 3))),
        "request": {"n": count if kind == "many" else 1, "best_of": count if kind == "best" else None, "beams": beams,
                    "priority": draw(st.integers(0, 2)), "tenant": draw(st.sampled_from("ab")),
                    "prompt_logprobs": draw(st.sampled_from([None, None, 1]))},
    }


class GroupMachine(RuleBasedStateMachine):
    @initialize(scheduler=schedulers(), depth=st.integers(1, 3), first=st.lists(wishes(), min_size=1, max_size=5),
                lazy=st.booleans(), failing=st.sampled_from([0.0, 0.1, 0.5]), chance=st.integers(0, 999))
    def make(self, scheduler: Scheduler, depth: int, first: list[dict[str, Any]], lazy: bool, failing: float,
             chance: int) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.worker = SimulatedWorker.beside(scheduler)
        if lazy:
            self.worker.chance, self.worker.failing = random.Random(chance), failing
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.ended_early: set[str] = set()
        self.failed: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.prompt_logprobs: dict[str, list[tuple[float, int]]] = {}
        for wish in first:
            self.arrive(wish)

    # ---- rules

    @rule(wish=wishes())
    def arrive(self, wish: dict[str, Any]) -> None:
        prompt = wish["prompt"][: self.scheduler.cache.max_tokens - 2]
        request = make_request(f"r{len(self.requests)}", prompt, wish["max_tokens"], seed=1000 + len(self.requests),
                               eos=wish["eos"], **wish["request"])
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            assert request.width > 1, "only a group can be too large here"
            return
        self.requests.append(request)

    def living(self) -> list[Request]:
        return [request for request in self.requests if request.status is not Status.FINISHED]

    @precondition(lambda self: len(self.living()) > 1)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.living()))
        self.ended_early.add(request.request_id)
        assert self.scheduler.abort(request.request_id)
        self.take_news()

    def stoppable(self) -> list[Sequence]:
        return [seq for request in self.living() if request.beams is None
                for seq in request.live if seq.num_output_tokens]

    @precondition(lambda self: self.stoppable())
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """As a stop string does: one sequence of a group ends by its text, the others go on."""
        seq = data.draw(st.sampled_from(self.stoppable()))
        self.stopped.add((seq.request.request_id, seq.index))
        self.scheduler.finish(seq, FinishReason.STOP, "end")

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            while len(self.in_flight) < self.depth and self.plan_one():
                pass
            self.collect_one()

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def plan(self) -> None:
        self.plan_one()

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        self.collect_one()

    @precondition(lambda self: not self.in_flight and self.living())
    @rule()
    def lose(self) -> None:
        """A step never happens; the worker hears no more of it than which rows are free."""
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.worker.moving
            return
        for row in plan.freed_rows:
            self.worker.rows.pop(row, None)
        names = {seq.row: r.request_id for r in self.scheduler.running.values() for seq in r.live}
        self.failed |= {names[entry.row] for entry in plan.entries}
        self.scheduler.fail_step("the step was lost")
        self.scheduler.never_started(plan)
        self.take_news()

    def plan_one(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            awaits = self.in_flight or self.worker.moving
            assert awaits or not self.living(), "requests wait and nothing is planned for them"
            return False
        limits = self.scheduler.limits
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert plan.entries or plan.copies or plan.transfers or plan.cancels
        self.in_flight.append((plan, self.worker.execute(plan)))
        return True

    @precondition(lambda self: self.worker.moving)
    @rule()
    def arrive_some(self) -> None:
        """KV comes in while no step does."""
        self.scheduler.arrived(self.worker.advance())
        self.take_news()

    def collect_one(self) -> None:
        if not self.in_flight:
            self.arrive_some()
        if self.in_flight:
            plan, result = self.in_flight.popleft()
            self.worker.retire(plan.step)
            self.scheduler.update(result)
            self.take_news()

    def take_news(self) -> None:
        for update in self.scheduler.take_updates():
            name = update.request.request_id
            self.outputs.setdefault((name, update.sequence.index), []).extend(update.new_tokens)
            self.prompt_logprobs.setdefault(name, []).extend(
                (-found.logprob, found.token_id) for found in unpack_all(update.prompt_logprobs or []))
            assert (update.sequence.error is None) == (name not in self.failed), update.sequence.error

    # ---- what must hold

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.stats.invariant_errors == 0

    @invariant()
    def sequences_of_a_group_hold_one_prompt(self) -> None:
        # A leader that changes over to somebody's cached block does so a result before siblings forked meanwhile.
        if not hasattr(self, "scheduler") or (self.in_flight and self.scheduler.cache.prefix_caching):
            return
        size = self.scheduler.cache.block_size
        for request in self.scheduler.running.values():
            seated = [seq for seq in request.live if seq.row >= 0]
            for group, kind in enumerate(self.scheduler.cache.groups):
                if kind.window is None:
                    held = {tuple(seq.kv.tables[group].blocks[: request.num_prompt_tokens // size]) for seq in seated}
                    assert len(held) == 1, "a prompt is in memory twice"

    def teardown(self) -> None:
        """Without new arrivals all comes to an end, within a bound, and with the right tokens."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(200 + 20 * sum(r.max_len * r.width for r in self.requests) * self.depth):
            if not self.living() and not self.in_flight:
                break
            self.step(1)
            self.scheduler.check()
        assert not self.living(), "a request starves"
        self.scheduler.arrived(self.worker.advance(most=True))
        assert all(pool.num_used == 0 for pool in self.scheduler.cache.pools), "blocks leaked"
        assert all(tier.num_used == 0 for tier in self.scheduler.cache.tiers), "host blocks leaked"
        assert not self.scheduler.has_work
        for request in self.requests:
            self.has_its_tokens(request)
        self.counts_add_up()

    def has_its_tokens(self, request: Request) -> None:
        name, prompt = request.request_id, len(request.prompt_token_ids)
        cut = name in self.ended_early or name in self.failed
        if request.params.prompt_logprobs is not None and not cut:
            assert self.prompt_logprobs[name] == list(enumerate(request.prompt_token_ids[1:])), "not once each"
        if request.beams is not None:
            if not cut:
                assert [self.outputs[name, index] for index in range(request.width)] == expected_beams(request)
            return
        for seq in request.sequences:
            found = self.outputs.get((name, seq.index), [])
            expected = expected_tokens(request, request.max_len, seq.index)
            assert found == seq.tokens[prompt:]
            assert found == (expected[: len(found)] if cut or (name, seq.index) in self.stopped else expected)

    def counts_add_up(self) -> None:
        stats, cache, swapper = self.scheduler.stats, self.scheduler.cache, self.scheduler.preemption.swapper
        counts = [request.counts for request in self.requests]
        assert stats.preemptions_for_memory == sum(c.preemptions_for_memory for c in counts)
        assert stats.preemptions_for_priority == sum(c.preemptions_for_priority for c in counts)
        assert stats.preemptions_for_loss == sum(c.preemptions_for_loss for c in counts)
        assert stats.preemptions == sum(request.num_preemptions for request in self.requests)
        assert stats.recomputed_tokens == sum(c.recomputed_tokens for c in counts)
        assert cache.stats.copies_on_write == sum(c.copies_on_write for c in counts)
        assert cache.stats.tier_hits == sum(c.tier_hits for c in counts)
        assert cache.stats.tier_hit_tokens == sum(c.tier_hit_tokens for c in counts)
        if swapper is not None:
            assert swapper.stats.out == sum(c.swaps_out for c in counts)
            assert swapper.stats.back == sum(c.swaps_in for c in counts)
            assert swapper.stats.bytes_out + swapper.stats.bytes_in == sum(c.swap_bytes for c in counts)


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, database=None, print_blob=True)
