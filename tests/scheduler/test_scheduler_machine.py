"""Random arrivals, aborts, shared prefixes, tiny pools: every request gets its tokens and nothing leaks."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.executor.dummy import dummy_token
from quire.sampling.token_logprobs import LogprobRecord, unpack_all
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.policy import PrefillFirst
from quire.scheduler.queue import FCFSQueue
from quire.scheduler.request import FinishReason, Request, Status
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import VOCAB, SimulatedWorker, expected_tokens, make_request, make_scheduler

WINDOWS = st.sampled_from([(None,), (None,), (None,), (3,), (None, 4), (6, None)])
PROMPTS = st.builds(lambda zeros, tail: [0] * zeros + tail, st.sampled_from([0, 1, 2, 3, 4, 6, 9]),
                    st.lists(st.integers(0, 1), min_size=1, max_size=4))


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    """What a request asks for, but for its place among the others."""
    return {
        "prompt": draw(PROMPTS),
        "again": draw(st.one_of(st.none(), st.tuples(st.integers(0, 99), st.integers(1, 99)))),
        "max_tokens": draw(st.sampled_from([1, 5, 12, 20, None])),
        "priority": draw(st.integers(0, 2)),
        "key": draw(st.sampled_from([b"", b"", b"", b"other"])),
        "logprobs": draw(st.sampled_from([None, None, None, 1])),
        "stops": draw(st.integers(0, 3)) == 3,
    }


@st.composite
def schedulers(draw: st.DrawFn) -> Scheduler:
    chunked = draw(st.booleans())
    num_blocks = draw(st.sampled_from([4, 6, 8, 9, 10, 12, 16]))
    block_size = draw(st.sampled_from([1, 2, 2, 3, 4]))
    windows = draw(WINDOWS)
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 4, 4, 6]))
    step_tokens = draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 24]))
    window_blocks = None
    if None in windows and len(windows) > 1 and chunked:
        # What one sequence and one step need; less than the rule of `worker/memory.py` gives to all of them.
        widest = max(w for w in windows if w is not None)
        window_blocks = min(num_blocks, -(-widest // block_size) + 2 + -(-step_tokens // block_size))
    return make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        windows=windows,
        window_blocks=window_blocks,
        queue=draw(st.sampled_from(["fcfs", "priority"])),
        policy=draw(st.sampled_from(["decode-first", "prefill-first"])),
        caching=draw(st.sampled_from([True, True, False])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        max_model_len=draw(st.sampled_from([5, 12, 20, 30, 60])),
        chunked_prefill=chunked,
        max_num_partial_prefills=draw(st.integers(1, 3)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(scheduler=schedulers(), depth=st.integers(1, 3), first=st.lists(wishes(), max_size=5))
    def make(self, scheduler: Scheduler, depth: int, first: list[dict[str, Any]]) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.worker = SimulatedWorker.beside(scheduler)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[LogprobRecord]] = {}
        for wish in first:
            self.come(wish)

    # ---- rules

    @rule(wish=wishes())
    def arrive(self, wish: dict[str, Any]) -> None:
        self.come(wish)

    def come(self, wish: dict[str, Any]) -> None:
        limits, cache = self.scheduler.limits, self.scheduler.cache
        longest = min(limits.max_model_len, cache.max_tokens) - 1
        if not limits.chunked_prefill:
            longest = min(longest, limits.max_num_batched_tokens)
        prompt = wish["prompt"]
        if self.requests and wish["again"] is not None:  # a second turn, or a shared beginning
            which, length = wish["again"]
            earlier = self.requests[which % len(self.requests)].sequences[0].tokens
            prompt = earlier[: 1 + length % len(earlier)] + prompt
        prompt = prompt[:longest]
        name, seed = f"r{len(self.requests)}", 1000 + len(self.requests)
        request = make_request(
            name, prompt, wish["max_tokens"], seed=seed, cache_key=wish["key"],
            priority=0 if isinstance(self.scheduler.waiting, FCFSQueue) else wish["priority"],
            prompt_logprobs=wish["logprobs"],
            stop_token_ids=[dummy_token(seed, 0, len(prompt) + 2, VOCAB)] if wish["stops"] else None)
        self.worker.keys[seed] = wish["key"]
        self.requests.append(request)
        self.outputs[name], self.prompt_logprobs[name] = [], []
        self.scheduler.add(request)

    def living(self) -> list[Request]:
        return [r for r in self.requests if r.status is not Status.FINISHED]

    @precondition(lambda self: len(self.living()) > 2)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.living()))
        assert self.scheduler.abort(request.request_id)
        self.aborted.add(request.request_id)
        self.take_news()

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.step_once()

    def step_once(self) -> None:
        """As the core does: plan up to the depth or as far as it goes, take in the oldest result."""
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

    def collect_one(self) -> None:
        if not self.in_flight:
            return
        plan, result = self.in_flight.popleft()
        self.worker.retire(plan.step)
        self.scheduler.update(result)
        self.take_news()

    def plan_one(self) -> bool:
        before = {r.request_id: r.num_preemptions for r in self.requests}
        plan = self.scheduler.schedule()
        self.preempted_are_at_the_head(before)
        if plan is None:
            assert self.in_flight or not self.living(), "requests wait and nothing is planned for them"
            return False
        self.within_limits(plan)
        self.in_flight.append((plan, self.worker.execute(plan)))
        return True

    def take_news(self) -> None:
        for update in self.scheduler.take_updates():
            name = update.request.request_id
            self.outputs[name] += update.new_tokens
            self.prompt_logprobs[name] += update.prompt_logprobs or []
            assert update.sequence.error is None, update.sequence.error

    # ---- what must hold

    def preempted_are_at_the_head(self, before: dict[str, int]) -> None:
        put_back = [r for r in self.requests if r.num_preemptions > before[r.request_id]]
        queue = list(self.scheduler.waiting)
        assert all(r in queue for r in put_back)
        rank = [(r.priority, r.arrival_index) for r in queue]
        assert rank == sorted(rank), "the waiting queue is out of order"
        lowest = min(((r.priority, r.arrival_index) for r in put_back), default=(99, 0))
        assert all((r.priority, r.arrival_index) < lowest for r in self.scheduler.running.values())

    def within_limits(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        running = [seq for r in self.scheduler.running.values() for seq in r.live]
        assert len(running) <= limits.max_num_seqs
        partial = [seq for seq in running if seq.num_to_compute > 1]
        assert len(partial) <= limits.max_num_partial_prefills
        if not limits.chunked_prefill:
            assert not [seq for seq in partial if not seq.request.num_preemptions], "a prompt was cut"
        for seq in running:
            assert seq.num_tokens <= seq.request.max_len
        if limits.long_prefill_token_threshold and limits.chunked_prefill:
            assert all(e.num_tokens <= limits.long_prefill_token_threshold for e in plan.entries)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.stats.invariant_errors == 0

    def teardown(self) -> None:
        """Without new arrivals all comes to an end, within a bound, and with the right tokens."""
        if not hasattr(self, "scheduler"):
            return
        total = sum(r.max_len for r in self.requests)
        longest = max((r.max_len for r in self.requests), default=0)
        # Between two tokens of the first in line the others may prefill, one token at a time at worst.
        between = longest if isinstance(self.scheduler.policy, PrefillFirst) else 2
        bound = 20 + (self.depth + 1) * total * between
        steps = 0
        while self.living() or self.in_flight:
            self.step_once()
            self.scheduler.check()
            steps += 1
            assert steps < bound, "a request starves"
        assert not self.scheduler.has_work
        for request in self.requests:
            self.has_its_tokens(request)
        cache = self.scheduler.cache
        assert all(pool.num_available == pool.num_blocks for pool in cache.pools), "blocks leaked"
        self.scheduler.check()

    def has_its_tokens(self, request: Request) -> None:
        name, prompt = request.request_id, len(request.prompt_token_ids)
        seq = request.sequences[0]
        expected = expected_tokens(request, request.max_len)
        if name in self.aborted:
            assert seq.finish_reason is FinishReason.ABORT
            expected = expected[: len(self.outputs[name])]
        else:
            stopped = expected[-1] in (request.params.stop_token_ids or ())
            assert seq.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert (request.num_cached_tokens or 0) < prompt
        assert self.outputs[name] == expected == seq.tokens[prompt:]
        if request.params.prompt_logprobs is not None:
            found = [(-p.logprob, p.token_id) for p in unpack_all(self.prompt_logprobs[name])]
            wanted = [(float(i), t) for i, t in enumerate(request.prompt_token_ids[1:])]
            assert found == (wanted[: len(found)] if name in self.aborted else wanted)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, database=None, print_blob=True)
