"""Rows of a lost step: refused until they are started anew, by one rule for every executor."""

from __future__ import annotations

from concurrent.futures import Future

from quire.executor.device import DeviceExecutor
from quire.executor.local import LocalExecutor
from quire.executor.lost_rows import REFUSED, LostRows, launch_sound
from quire.sampling.params import SamplingParams
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import EntryResult, PlanEntry, RowStart, StepPlan, StepResult, TableDiff


def started(row: int) -> RowStart:
    return RowStart(row, [1, 2], 2, SamplingParams(), 0, 0)


def plan(step: int, *rows: int, starts: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step, starts=[started(row) for row in starts], diffs=[TableDiff(row, 0, 0, [row]) for row in rows],
                    entries=[PlanEntry(row, 0, 1, True) for row in rows])


def rows_of(sound: StepPlan) -> list[int]:
    return [entry.row for entry in sound.entries]


def test_entries_of_lost_rows_and_of_who_shares_their_logits_are_refused_until_a_new_start() -> None:
    guard = LostRows()
    guard.sound(plan(1, 0, 1, starts=(0, 1)))
    guard.lost(plan(1, 0, 1, starts=(0, 1)))
    sharing = plan(2, 0, 2)
    sharing.entries.append(PlanEntry(3, 1, 0, True, shares=1))
    sound = guard.sound(sharing)
    assert rows_of(sound.plan) == [2] and [diff.row for diff in sound.plan.diffs] == [2]
    whole = sound.whole(StepResult(2, [EntryResult([7])]))
    assert [entry.error for entry in whole.entries] == [REFUSED, None, REFUSED] and whole.entries[1].tokens == [7]
    assert rows_of(guard.sound(plan(3, 0, 1, 2, starts=(0,))).plan) == [0, 2]


def test_a_row_that_was_only_started_in_a_lost_step_is_lost_too() -> None:
    """Its table is still that of its former owner, although the lost step computed nothing for it."""
    guard = LostRows()
    guard.lost(plan(1, 0, starts=(0, 5)))
    assert rows_of(guard.sound(plan(2, 5, 6)).plan) == [6]


def test_a_loss_that_shows_late_spares_rows_that_were_started_meanwhile() -> None:
    guard = LostRows()
    late: Future[StepResult] = Future()
    first = guard.sound(plan(1, 0, 1, starts=(0, 1)))
    guard.watch(first.plan, late)
    assert rows_of(guard.sound(plan(2, 0, 1, starts=(0,))).plan) == [0, 1]  # launched before anybody knew
    late.set_exception(RuntimeError("the results could not be read"))
    assert rows_of(guard.sound(plan(3, 0, 1)).plan) == [0]


def test_a_guard_that_is_told_of_trouble_looks_at_nothing_until_then_and_at_everything_from_then_on() -> None:
    guard = LostRows(told=True)
    futures: list[Future[StepResult]] = [Future() for _ in range(3)]

    def launch(step: int) -> list[int]:
        ran: list[int] = []
        launch_sound(guard, plan(step, 0, 1), lambda sound: (ran.extend(rows_of(sound)), futures[step])[1])
        return ran

    assert launch(0) == [0, 1]
    futures[0].set_result(StepResult(0, []))
    assert launch(1) == [0, 1]
    guard.troubled = True
    futures[1].set_exception(RuntimeError("lost"))
    assert launch(2) == []


def test_a_launch_that_fails_is_trouble_that_nobody_has_to_tell_a_guard() -> None:
    guard = LostRows(told=True)

    def fail(sound: StepPlan) -> Future[StepResult]:
        raise ValueError("no room")

    assert launch_sound(guard, plan(1, 0), fail).exception() is not None
    assert rows_of(guard.sound(plan(2, 0, 1)).plan) == [1]


class Launcher:
    """A device that loses some launches and some results; it notes the rows that it ran."""

    def __init__(self, lost_at_launch: set[int] = frozenset(), raised: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.ran: dict[int, list[int]] = {}
        self.pending: dict[int, Future[StepResult]] = {}
        self._lost, self._raised = lost_at_launch, raised
        self.arrivals = ArrivalBox()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if plan.step in self._raised:
            raise KeyError("a bug in the launch")
        self.pending[plan.step] = future = Future()
        if plan.step in self._lost:
            future.set_exception(RuntimeError("out of memory"))
        else:
            self.ran[plan.step] = [entry.row for entry in plan.entries]
        return future

    def deliver(self, step: int) -> None:
        self.pending[step].set_result(StepResult(step, [EntryResult([row]) for row in self.ran[step]]))

    def close(self) -> None:
        pass


def test_a_device_refuses_rows_of_a_launch_that_failed_and_keeps_the_order_of_results() -> None:
    for device in (Launcher(lost_at_launch={1}), Launcher(raised={1})):
        executor = DeviceExecutor(device)
        lost = executor.submit(plan(1, 0, 1, starts=(0, 1)))
        assert lost.exception(0) is not None
        second = executor.submit(plan(2, 0, 2, 1))
        assert device.ran[2] == [2] and not second.done()
        device.deliver(2)
        assert [(entry.tokens, entry.error) for entry in second.result(0).entries] == [
            ([], REFUSED), ([2], None), ([], REFUSED)]


def test_a_device_refuses_rows_of_a_step_whose_result_was_lost() -> None:
    device = Launcher()
    executor = DeviceExecutor(device)
    first, _ = executor.submit(plan(1, 0, 1, starts=(0, 1))), executor.submit(plan(2, 0, 1))
    first.set_exception(RuntimeError("the results could not be read"))
    executor.submit(plan(3, 0, 1, 2, starts=(1,)))
    assert device.ran[2] == [0, 1] and device.ran[3] == [1, 2]


def test_a_future_of_a_part_can_be_cancelled_and_may_fail() -> None:
    device = Launcher(lost_at_launch={1})
    executor = DeviceExecutor(device)
    executor.submit(plan(1, 0))
    cancelled, failing = executor.submit(plan(2, 0, 1)), executor.submit(plan(3, 0, 1))
    assert cancelled.cancel()
    device.deliver(2)
    device.pending[3].set_exception(RuntimeError("lost as well"))
    assert isinstance(failing.exception(0), RuntimeError)


class Losing:
    def __init__(self) -> None:
        self.ran: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == 1:
            raise RuntimeError("the worker fell over")
        self.ran[plan.step] = [entry.row for entry in plan.entries]
        return StepResult(plan.step, [EntryResult([1]) for _ in plan.entries])

    def close(self) -> None:
        pass


def test_the_executor_of_this_process_keeps_the_same_rule() -> None:
    for overlap in (False, True):
        worker = Losing()
        executor = LocalExecutor(worker, overlap)
        futures = [executor.submit(plan(1, 0, starts=(0, 4))), executor.submit(plan(2, 0, 4, 2)),
                   executor.submit(plan(3, 0, 4, starts=(4,)))]
        assert isinstance(futures[0].exception(10), RuntimeError)
        assert [entry.error for entry in futures[1].result(10).entries] == [REFUSED, REFUSED, None]
        assert [entry.error for entry in futures[2].result(10).entries] == [REFUSED, None]
        assert worker.ran == {2: [2], 3: [4]}
        executor.close()
