"""What a step holds, who goes first, who is refused, and what becomes of a request that ends early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.errors import InvalidRequestError
from quire.executor.dummy import DummyExecutor
from quire.scheduler.plan import EntryResult, StepPlan, StepResult
from quire.scheduler.request import FinishReason, Request, Status
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.simulation import VOCAB, expected_tokens, make_request, make_scheduler


def tokens_by_request(scheduler: Scheduler, plan: StepPlan | None) -> dict[str, int]:
    """How many tokens of whom the plan computes, in its order."""
    assert plan is not None
    names = {seq.row: r.request_id for r in scheduler.running.values() for seq in r.sequences}
    return {names[entry.row]: entry.num_tokens for entry in plan.entries}


class Driver:
    """Plans and takes in one step after another."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.executor = DummyExecutor(VOCAB)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> dict[str, int]:
        plan = self.scheduler.schedule()
        shown = tokens_by_request(self.scheduler, plan)
        assert plan is not None
        self.scheduler.update(self.executor.execute(plan))
        self.scheduler.check()
        return shown

    def drain(self) -> None:
        while self.scheduler.running or len(self.scheduler.waiting):
            self.step()


def drive(**options: object) -> Driver:
    return Driver(make_scheduler(**options))  # type: ignore[arg-type]


def prompt(n: int, salt: int = 0) -> list[int]:
    return [100 * salt + i for i in range(n)]


# ---- what is said of a step


def test_a_step_in_which_everybody_decodes_says_so_and_one_with_a_chunk_does_not() -> None:
    """The executor of these tests refuses a plan that says so wrongly."""
    d = drive(max_num_batched_tokens=8)
    d.add(make_request("a", prompt(3), 9), make_request("b", prompt(4, 1), 9))
    said = []
    for _ in range(6):
        if len(said) == 3:
            d.add(make_request("c", prompt(7, 2), 2))
        plan = d.scheduler.schedule()
        assert plan is not None
        said.append(plan.decoding)
        d.scheduler.update(d.executor.execute(plan))
    decodes = [([0, 1], [3, 4]), ([0, 1], [4, 5])], [([0, 1, 2], [6, 7, 6]), ([0, 1, 2], [7, 8, 7])]
    assert said == [None, *decodes[0], None, *decodes[1]]  # the last token of a prompt is computed as any other


# ---- order


def test_first_come_is_first_served() -> None:
    d = drive(max_num_seqs=2)
    d.add(*[make_request(name, prompt(3), 2) for name in "abc"])
    assert list(d.step()) == ["a", "b"]
    d.step()
    assert list(d.step()) == ["c"]


def test_a_lower_priority_number_is_served_first_and_equals_by_arrival() -> None:
    d = drive(queue="priority", max_num_seqs=1)
    for name, priority in [("late", 2), ("first", 1), ("second", 1), ("urgent", 0)]:
        d.add(make_request(name, prompt(2), 1, priority=priority))
    assert [list(d.step()) for _ in range(4)] == [["urgent"], ["first"], ["second"], ["late"]]


def test_the_head_of_the_queue_is_not_overtaken_by_one_that_would_fit() -> None:
    d = drive(num_blocks=4, block_size=4)
    d.add(make_request("a", prompt(7), 3), make_request("big", prompt(11, 1), 1))
    d.add(make_request("small", prompt(2, 2), 1))
    assert d.step() == {"a": 7}
    assert d.scheduler.waiting.peek().request_id == "big"


# ---- what fills a step


def test_decode_first_fills_up_with_prompts() -> None:
    d = drive(max_num_batched_tokens=10)
    d.add(make_request("a", prompt(4), 9))
    assert d.step() == {"a": 4}
    d.add(make_request("b", prompt(12, 1), 9), make_request("c", prompt(5, 2), 9))
    assert d.step() == {"a": 1, "b": 9}
    assert d.step() == {"a": 1, "b": 3, "c": 5}
    assert d.step() == {"a": 1, "b": 1, "c": 1}


def test_prefill_first_keeps_prompts_and_decoding_apart() -> None:
    d = drive(max_num_batched_tokens=10, policy="prefill-first")
    d.add(make_request("a", prompt(4), 9))
    assert d.step() == {"a": 4}
    d.add(make_request("b", prompt(12, 1), 9), make_request("c", prompt(5, 2), 9))
    assert d.step() == {"b": 10}
    assert d.step() == {"b": 2, "c": 5}
    assert d.step() == {"a": 1, "b": 1, "c": 1}


def test_a_long_prompt_is_computed_in_chunks_and_drawn_from_at_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    scheduler.add(make_request("a", prompt(12), 1))
    executor = DummyExecutor(VOCAB)
    seen = []
    while (plan := scheduler.schedule()) is not None:
        seen += [(e.start, e.num_tokens, e.sample) for e in plan.entries]
        scheduler.update(executor.execute(plan))
    assert seen == [(0, 5, False), (5, 5, False), (10, 2, True)]


def test_the_long_prefill_threshold_caps_one_prompt_not_the_step() -> None:
    d = drive(max_num_batched_tokens=20, long_prefill_token_threshold=4, max_num_partial_prefills=2)
    d.add(*[make_request(name, prompt(9, i), 1) for i, name in enumerate("abc")])
    assert d.step() == {"a": 4, "b": 4}
    assert d.step() == {"a": 4, "b": 4, "c": 4}
    assert d.step() == {"a": 1, "b": 1, "c": 4}


def test_at_most_max_num_partial_prefills_prompts_are_half_computed() -> None:
    d = drive(max_num_batched_tokens=8, max_num_partial_prefills=1)
    lengths = {"a": 20, "b": 21, "c": 2}
    d.add(*[make_request(name, prompt(length, length), 1) for name, length in lengths.items()])
    assert [d.step() for _ in range(3)] == [{"a": 8}, {"a": 8}, {"a": 4, "b": 4}]


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_all_of_it() -> None:
    d = drive(max_num_batched_tokens=10, chunked_prefill=False)
    d.add(make_request("a", prompt(6), 2), make_request("b", prompt(10, 1), 1))
    assert [d.step() for _ in range(3)] == [{"a": 6}, {"a": 1}, {"b": 10}]


def test_no_more_than_max_num_seqs_run() -> None:
    d = drive(max_num_seqs=3)
    d.add(*[make_request(str(i), prompt(2, i), 5) for i in range(7)])
    assert len(d.step()) == 3
    assert len(d.scheduler.waiting) == 4


# ---- refusal


@pytest.mark.parametrize(("options", "length", "limit"), [
    ({"max_model_len": 16}, 16, r"max_model_len \(16\) allows 15"),
    ({"num_blocks": 3, "block_size": 4}, 12, r"num_kv_blocks \(3\) times block_size \(4\) allows 11"),
    ({"chunked_prefill": False, "max_num_batched_tokens": 8}, 9, r"max_num_batched_tokens \(8\)"),
    ({}, 0, "empty"),
])
def test_a_prompt_that_can_never_run_is_refused_with_the_limit_named(
    options: dict[str, int], length: int, limit: str
) -> None:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=limit) as caught:
        scheduler.add(make_request("a", prompt(length)))
    assert caught.value.field == "prompt"
    assert not scheduler.has_work
    if length:
        scheduler.add(make_request("a", prompt(length - 1), 1))
        Driver(scheduler).drain()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    d = drive()
    d.add(make_request("a", prompt(2), 1))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        d.add(make_request("a", prompt(2)))
    d.drain()
    d.add(make_request("a", prompt(2)))


# ---- ends


def test_output_ends_where_model_length_or_pool_ends() -> None:
    for options in ({"max_model_len": 10}, {"num_blocks": 5, "block_size": 2}):
        d = drive(**options)
        request = make_request("a", prompt(4), None)
        d.add(request)
        d.drain()
        assert len(request.sequences[0].tokens) == 10
        assert request.sequences[0].finish_reason is FinishReason.LENGTH


def test_a_stop_token_id_ends_with_its_id_as_the_reason_and_eos_without() -> None:
    d = drive()
    third = expected_tokens(make_request("x", prompt(4), 3, seed=5), 99)[-1]
    by_id = make_request("id", prompt(4), 9, seed=5, stop_token_ids=[third])
    by_eos = make_request("eos", prompt(4), 9, seed=5, eos=frozenset([third]))
    ignoring = make_request("ignoring", prompt(4), 9, seed=5, eos=frozenset([third]), ignore_eos=True)
    d.add(by_id, by_eos, ignoring)
    d.drain()
    ends = [(s.num_output_tokens, s.finish_reason, s.stop_reason)
            for s in (r.sequences[0] for r in (by_id, by_eos, ignoring))]
    assert ends == [(3, "stop", third), (3, "stop", None), (9, "length", None)]


@pytest.mark.parametrize("moment", ["waiting", "running", "in flight"])
def test_an_abort_at_any_moment_frees_everything(moment: str) -> None:
    d = drive(max_num_seqs=1)
    d.add(make_request("first", prompt(9), 5), make_request("second", prompt(9, 1), 5))
    d.step()
    d.scheduler.take_updates()
    plan = d.scheduler.schedule() if moment == "in flight" else None
    name = "second" if moment == "waiting" else "first"
    assert d.scheduler.abort(name) and not d.scheduler.abort(name)
    if plan is not None:
        d.scheduler.update(d.executor.execute(plan))
    ended = [u for u in d.scheduler.take_updates() if u.sequence.finished]
    assert [(u.request.request_id, u.sequence.finish_reason) for u in ended] == [(name, FinishReason.ABORT)]
    d.drain()
    d.scheduler.take_updates()
    assert not d.scheduler.has_work and d.scheduler.stats.requests_aborted == 1
    assert d.scheduler.cache.pools[0].num_used == 0
    d.scheduler.check()


def test_a_sequence_ended_from_outside_brings_no_further_tokens() -> None:
    d = drive()
    request = make_request("a", prompt(3), 9)
    d.add(request)
    d.step()
    plan = d.scheduler.schedule()
    assert plan is not None
    d.scheduler.take_updates()
    d.scheduler.finish(request.sequences[0], FinishReason.STOP, "###")
    d.scheduler.update(d.executor.execute(plan))
    assert d.scheduler.take_updates() == []
    assert (request.sequences[0].num_output_tokens, request.sequences[0].stop_reason) == (1, "###")


def test_an_entrys_error_ends_that_request_alone() -> None:
    d = drive()
    good, bad = make_request("good", prompt(3), 3), make_request("bad", prompt(3, 1), 3)
    d.add(good, bad)
    plan = d.scheduler.schedule()
    assert plan is not None
    result = d.executor.execute(plan)
    result.entries[1] = EntryResult(error="its logits are not numbers")
    d.scheduler.update(result)
    d.drain()
    assert bad.sequences[0].error == "its logits are not numbers"
    assert good.sequences[0].finish_reason is FinishReason.LENGTH
    assert d.scheduler.stats.requests_failed == 1 and d.scheduler.cache.pools[0].num_used == 0


def test_a_draw_that_gives_no_token_ends_the_request_instead_of_hanging_it() -> None:
    d = drive()
    request = make_request("a", prompt(3), 3)
    d.add(request)
    plan = d.scheduler.schedule()
    assert plan is not None
    d.scheduler.update(StepResult(plan.step, [EntryResult()]))
    assert "drew no token" in (request.sequences[0].error or "")
    assert not d.scheduler.running


def test_a_result_of_another_step_fails_the_step_that_was_due() -> None:
    d = drive()
    request = make_request("a", prompt(3), 3)
    d.add(request)
    plan = d.scheduler.schedule()
    assert plan is not None
    d.scheduler.update(StepResult(plan.step + 1, [EntryResult([1])]))
    assert "result of step 2 came when step 1 was due" in (request.sequences[0].error or "")
    d.add(make_request("b", prompt(3), 3))
    d.executor = DummyExecutor(VOCAB)
    d.drain()


# ---- preemption


def test_the_last_come_is_preempted_goes_back_to_the_head_and_loses_no_token() -> None:
    d = drive(num_blocks=6, block_size=2)
    requests = [make_request(name, prompt(3, i), 8) for i, name in enumerate("abc")]
    d.add(*requests, make_request("d", prompt(3, 3), 8))
    while not d.scheduler.stats.preemptions:
        d.step()
    assert [r.request_id for r in d.scheduler.waiting] == ["c", "d"]
    assert requests[2].status is Status.WAITING and requests[2].sequences[0].row == -1
    d.drain()
    for request in requests:
        assert request.sequences[0].tokens[3:] == expected_tokens(request, 99)


def test_the_lowest_priority_is_preempted_even_if_it_came_first() -> None:
    d = drive(num_blocks=6, block_size=2, queue="priority")
    low = make_request("low", prompt(3), 8, priority=1)
    high = make_request("high", prompt(3, 1), 8, priority=0)
    d.add(low)
    d.step()
    d.add(high)
    d.drain()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    d = drive(num_blocks=7, block_size=2)
    requests = [make_request(name, prompt(3, i), 8) for i, name in enumerate("ab")]
    d.add(*requests)
    d.drain()
    assert d.scheduler.stats.preemptions
    assert d.scheduler.stats.recomputed_tokens < sum(len(r.sequences[0].tokens) for r in requests)


# ---- the prefix cache, seen from here


def test_the_last_prompt_token_is_always_computed() -> None:
    d = drive(block_size=4)
    for name in "ab":
        d.add(make_request(name, prompt(8), 1))
        plan = d.step()
        d.drain()
    assert plan == {"b": 4}


def test_a_second_turn_finds_the_first_ones_generated_tokens() -> None:
    d = drive(block_size=4)
    first = make_request("first", prompt(6), 7)
    d.add(first)
    d.drain()
    tokens = first.sequences[0].tokens
    second = make_request("second", [*tokens, 7, 8], 2)
    d.add(second)
    d.drain()
    assert second.num_cached_tokens == 12, "13 tokens, of which the last was drawn and never computed"


def test_requests_with_different_cache_keys_share_nothing() -> None:
    d = drive()
    for name, key in [("a", b"tenant-a"), ("b", b"tenant-b"), ("c", b"tenant-a")]:
        request = make_request(name, prompt(9), 1, cache_key=key)
        d.add(request)
        d.drain()
        assert request.num_cached_tokens == (8 if name == "c" else 0)


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole() -> None:
    d = drive()
    d.add(make_request("a", prompt(9), 1))
    d.drain()
    d.add(make_request("b", prompt(9), 1, prompt_logprobs=0))
    assert d.step() == {"b": 9}


# ---- rule 2


def test_scheduler_and_kvcache_import_neither_torch_nor_numpy() -> None:
    code = """
import sys, pkgutil, importlib
for room in ("quire.scheduler", "quire.kvcache"):
    package = importlib.import_module(room)
    for module in pkgutil.iter_modules(package.__path__, room + "."):
        importlib.import_module(module.name)
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
