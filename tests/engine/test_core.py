"""The step loop: at any depth the same tokens, and whatever fails, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from quire.engine.core import EngineCore
from quire.errors import InvariantError
from quire.executor.base import Executor
from quire.executor.local import LocalExecutor
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.request import FinishReason, Request
from quire.scheduler.scheduler import Scheduler, SequenceUpdate
from tests.scheduler.simulation import (
    SimulatedExecutor,
    SimulatedWorker,
    expected_tokens,
    make_request,
    make_scheduler,
)


def make_core(depth: int = 1, **options: int | bool) -> tuple[EngineCore, SimulatedExecutor]:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    executor = SimulatedExecutor(SimulatedWorker.beside(scheduler))
    return EngineCore(scheduler, executor, depth), executor


def run(core: EngineCore, most: int = 500) -> list[SequenceUpdate]:
    news = []
    while core.has_work:
        news += core.step()
        most -= 1
        assert most, "the engine does not come to rest"
    return news


def requests(count: int, length: int = 5, max_tokens: int = 6) -> list[Request]:
    prompts = [[100 * i + j for j in range(length)] for i in range(count)]
    return [make_request(f"r{i}", prompt, max_tokens, seed=i) for i, prompt in enumerate(prompts)]


def got_its_tokens(request: Request) -> bool:
    seq = request.sequences[0]
    expected = expected_tokens(request, request.max_len)
    return seq.error is None and seq.tokens[seq.num_prompt_tokens :] == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_request_gets_its_tokens_at_any_depth(depth: int) -> None:
    core, _ = make_core(depth, num_blocks=9, block_size=2, max_num_seqs=3)
    made = requests(7)
    for request in made:
        core.add(request)
    news = run(core)
    assert all(got_its_tokens(request) for request in made)
    for request in made:
        streamed = [t for u in news if u.request is request for t in u.new_tokens]
        assert streamed == request.sequences[0].tokens[5:]
    assert core.scheduler.stats.preemptions, "the pool was meant to be too small"
    assert core.scheduler.cache.pools[0].num_used == 0


def test_depth_two_plans_a_step_before_the_last_ones_result_is_in() -> None:
    core, executor = make_core(2)
    core.add(requests(1)[0])
    core.step()
    assert [plan.step for plan in executor.plans] == [1, 2]
    assert core.scheduler.num_in_flight == 1


def test_a_worker_on_its_own_thread_gives_the_same_tokens() -> None:
    scheduler = make_scheduler()

    class Worker(SimulatedWorker):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            self.retire(plan.step)
            return result

    core = EngineCore(scheduler, LocalExecutor(Worker.beside(scheduler), overlap=True), 2)
    made = requests(4)
    for request in made:
        core.add(request)
    run(core)
    core.close()
    assert all(got_its_tokens(request) for request in made)


# ---- failures


def test_a_lost_step_fails_its_requests_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    core, executor = make_core(max_num_seqs=2)
    made = requests(4)
    executor.fail_steps = {3}
    for request in made:
        core.add(request)
    run(core)
    for request in made[:2]:
        assert request.sequences[0].error == (
            "the step that computed this request failed: RuntimeError: the device fell over")
    assert "a step failed" in caplog.text and "RuntimeError: the device fell over" in caplog.text
    assert all(got_its_tokens(request) for request in made[2:])
    assert core.scheduler.stats.requests_failed == 2
    assert core.scheduler.cache.pools[0].num_used == 0


def test_an_entry_error_fails_one_request_alone() -> None:
    core, executor = make_core()
    made = requests(3)
    executor.fail_rows = {2: {1}}
    for request in made:
        core.add(request)
    run(core)
    assert [request.sequences[0].error for request in made] == [None, "this row is cursed", None]
    assert got_its_tokens(made[0]) and got_its_tokens(made[2])


class Refusing(Executor):
    """Raises in `submit` itself, once."""

    def __init__(self, inner: Executor, error: BaseException) -> None:
        self._inner, self._error = inner, error
        self._refused = False

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if plan.step == 2 and not self._refused:
            self._refused = True
            raise self._error
        return self._inner.submit(plan)


def refusing_core(error: BaseException) -> EngineCore:
    core, executor = make_core(max_num_seqs=1)
    # The simulated device counts every step that it was given.
    submit = executor.submit
    core.executor = Refusing(executor, error)
    executor.submit = submit  # type: ignore[method-assign]
    return core


def test_an_executor_that_raises_on_submission_loses_that_step_only() -> None:
    core = refusing_core(OSError("the pipe is broken"))
    made = requests(2)
    for request in made:
        core.add(request)
    run(core)
    assert "the pipe is broken" in (made[0].sequences[0].error or "")
    assert got_its_tokens(made[1])


def test_an_interrupted_submission_reaches_the_caller_and_the_engine_can_go_on() -> None:
    core = refusing_core(KeyboardInterrupt())
    made = requests(2)
    for request in made:
        core.add(request)
    core.step()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    run(core)
    assert "KeyboardInterrupt" in (made[0].sequences[0].error or "")
    assert got_its_tokens(made[1])


def test_an_interrupt_while_waiting_for_a_result_loses_nothing() -> None:
    core, executor = make_core()
    request = requests(1)[0]
    core.add(request)
    submit = executor.submit

    def interrupted(plan: StepPlan) -> Future[StepResult]:
        future = submit(plan)
        executor.submit = submit  # type: ignore[method-assign]
        inner: Callable[..., object] = future.exception

        def once(timeout: float | None = None) -> object:
            future.exception = inner  # type: ignore[method-assign, assignment]
            raise KeyboardInterrupt

        future.exception = once  # type: ignore[method-assign, assignment]
        return future

    executor.submit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        core.step()
    run(core)
    assert got_its_tokens(request)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("lost", [1, 2, 3, 5])
def test_plans_made_before_a_lost_step_was_known_harm_nobody_else(depth: int, lost: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9, max_num_partial_prefills=2, max_num_seqs=4)

    class Stumbling(SimulatedWorker):
        def execute(self, plan: StepPlan) -> StepResult:
            if plan.step == lost:
                self.contents.begin(plan.step)
                self.retire(plan.step)
                raise RuntimeError("the device fell over")
            result = super().execute(plan)
            self.retire(plan.step)
            return result

    core = EngineCore(scheduler, LocalExecutor(Stumbling.beside(scheduler)), depth)
    made = requests(7)
    for request in made:
        core.add(request)
    run(core)
    failed = [request for request in made if request.sequences[0].error]
    assert 0 < len(failed) < len(made), [r.sequences[0].error for r in made]
    assert all(got_its_tokens(request) for request in made if request not in failed)
    scheduler.check()
    again = make_request("again", [1, 2, 3], 5)
    core.add(again)
    run(core)
    assert got_its_tokens(again)


# ---- quarantine


def corrupt_last_block(scheduler: Scheduler, request: Request, references: int) -> None:
    block = request.sequences[0].kv.tables[0].blocks[-1]
    scheduler.cache.pools[0].counts[block] = references


@pytest.mark.parametrize("references", [0, 3])
def test_a_broken_reference_count_stops_at_most_that_request_and_heals_at_rest(references: int) -> None:
    core, _ = make_core(caching=False)
    victim, bystander = requests(2)
    core.add(victim)
    core.add(bystander)
    core.step()
    corrupt_last_block(core.scheduler, victim, references)
    run(core)
    assert got_its_tokens(bystander)
    if references == 0:
        assert "internal error" in (victim.sequences[0].error or "")
        assert victim.sequences[0].finish_reason is FinishReason.ABORT
    core.step()
    assert core.scheduler.stats.invariant_errors > 0
    core.scheduler.check()
    assert core.scheduler.cache.pools[0].num_available == core.scheduler.cache.num_blocks
    later = make_request("later", [1, 2, 3], 4)
    core.add(later)
    run(core)
    assert got_its_tokens(later)


def test_blocks_in_quarantine_stay_out_of_circulation_while_others_run() -> None:
    core, _ = make_core(caching=False)
    victim, bystander = requests(2, max_tokens=20)
    core.add(victim)
    core.add(bystander)
    core.step()
    held = set(victim.sequences[0].kv.tables[0].blocks)
    corrupt_last_block(core.scheduler, victim, 0)
    while not victim.sequences[0].finished:
        core.step()
    pool = core.scheduler.cache.pools[0]
    taken = {pool.allocate() for _ in range(pool.num_available)}
    assert not taken & held


def test_a_prefix_that_breaks_on_admission_fails_that_request_alone() -> None:
    core, _ = make_core()
    first = make_request("first", list(range(9)), 1)
    core.add(first)
    run(core)
    pool = core.scheduler.cache.pools[0]
    pool._policy.remove(0)  # the block is cached, but its policy forgot it
    second, third = make_request("second", list(range(9)), 1), make_request("third", [7] * 9, 1)
    pool.acquire = _raising  # type: ignore[method-assign]
    core.add(second)
    core.add(third)
    run(core)
    assert "the shelf is empty" in (second.sequences[0].error or "")
    assert got_its_tokens(third)
    core.step()
    core.scheduler.check()


def _raising(block: int) -> None:
    raise InvariantError("the shelf is empty")


def test_a_request_that_finds_no_room_for_ever_is_ended() -> None:
    core, _ = make_core(num_blocks=4, block_size=4)
    pool = core.scheduler.cache.pools[0]
    pool.allocate()  # a leak that no count reveals while something runs
    pool.allocate()
    core.scheduler.examine = lambda: False  # type: ignore[method-assign]
    request = make_request("a", list(range(9)), 1)
    core.add(request)
    run(core)
    assert "no room left" in (request.sequences[0].error or "")


def test_a_leak_in_an_idle_engine_is_mended_before_it_costs_a_request() -> None:
    core, _ = make_core(num_blocks=4, block_size=4)
    core.scheduler.cache.pools[0].allocate()
    core.scheduler.cache.pools[0].allocate()
    request = make_request("a", list(range(9)), 1)
    core.add(request)
    run(core)
    assert got_its_tokens(request)


def test_closing_lets_go_of_the_executor() -> None:
    closed = []
    core, executor = make_core()
    executor.close = lambda: closed.append(True)  # type: ignore[method-assign]
    core.add(requests(1)[0])
    core.step()
    core.close()
    assert closed
