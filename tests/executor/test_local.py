"""The executor in this process: plans in order, failures in the future and nowhere else."""

from __future__ import annotations

import threading

import pytest

from quire.executor.local import LocalExecutor
from quire.scheduler.plan import StepPlan, StepResult


class Recorder:
    """A worker that notes what it ran and where."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.closed = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.current_thread().name)
        self.steps.append(plan.step)
        if plan.step == 13:
            raise RuntimeError("unlucky")
        return StepResult(plan.step, [])

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("overlap", [False, True])
def test_plans_run_in_the_order_of_submission(overlap: bool) -> None:
    worker = Recorder()
    executor = LocalExecutor(worker, overlap)
    futures = [executor.submit(StepPlan(step)) for step in range(5)]
    assert [f.result(10).step for f in futures] == worker.steps == list(range(5))
    executor.close()
    assert worker.closed


@pytest.mark.parametrize("overlap", [False, True])
def test_a_lost_step_shows_in_its_future_and_the_next_one_runs(overlap: bool) -> None:
    executor = LocalExecutor(Recorder(), overlap)
    lost, fine = executor.submit(StepPlan(13)), executor.submit(StepPlan(14))
    assert isinstance(lost.exception(10), RuntimeError)
    assert fine.result(10).step == 14
    executor.close()


def test_only_overlap_leaves_the_callers_thread() -> None:
    for overlap in (False, True):
        worker = Recorder()
        executor = LocalExecutor(worker, overlap)
        executor.submit(StepPlan(1)).result(10)
        assert (threading.current_thread().name in worker.threads) is not overlap
        executor.close()
