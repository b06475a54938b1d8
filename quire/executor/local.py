"""Runs plans on a worker in this process: at once, or on a thread so that planning goes on meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from quire.executor.base import Executor
from quire.scheduler.plan import EntryResult, PlanEntry, StepPlan, StepResult


class PlanRunner(Protocol):
    """What the executor needs of a worker."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class LocalExecutor(Executor):
    """One worker, in this thread or in one of its own.

    When a step is lost, plans made before that was known may still speak of its rows, whose tables and tokens
    are not what those plans assume: such entries are not run and come back with an error. Starting a row anew
    mends it.
    """

    def __init__(self, worker: PlanRunner, overlap: bool = False) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-worker") if overlap else None
        self._lost_rows: set[int] = set()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._thread is not None:
            return self._thread.submit(self._execute, plan)
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def _execute(self, plan: StepPlan) -> StepResult:
        if self._lost_rows:
            self._lost_rows.difference_update(start.row for start in plan.starts)
            if any(self._is_lost(entry) for entry in plan.entries):
                return self._execute_sound(plan)
        try:
            return self._worker.execute(plan)
        except BaseException:
            self._lost_rows.update(entry.row for entry in plan.entries)
            raise

    def _execute_sound(self, plan: StepPlan) -> StepResult:
        lost = self._lost_rows
        entries = [entry for entry in plan.entries if not self._is_lost(entry)]
        diffs = [diff for diff in plan.diffs if diff.row not in lost]
        results = iter(self._execute(replace(plan, entries=entries, diffs=diffs)).entries)
        refused = "an earlier step of this request was lost"
        return StepResult(plan.step, [
            EntryResult(error=refused) if self._is_lost(entry) else next(results) for entry in plan.entries])

    def _is_lost(self, entry: PlanEntry) -> bool:
        return entry.row in self._lost_rows or entry.shares in self._lost_rows

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._worker.close()
