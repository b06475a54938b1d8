"""Runs plans on a worker in this process: at once, or on a thread so that planning goes on meanwhile."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from quire.executor.base import Executor
from quire.scheduler.plan import StepPlan, StepResult


class PlanRunner(Protocol):
    """What the executor needs of a worker."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class LocalExecutor(Executor):
    def __init__(self, worker: PlanRunner, overlap: bool = False) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-worker") if overlap else None

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._thread is not None:
            return self._thread.submit(self._worker.execute, plan)
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._worker.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._worker.close()
