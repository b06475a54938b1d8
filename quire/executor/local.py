"""Runs plans on a worker in this process: at once, or on a thread so that planning goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from quire.executor.base import Executor
from quire.executor.lost_rows import LostRows
from quire.kernels.routing import LayerLoad
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import StepPlan, StepResult


class PlanRunner(Protocol):
    """What the executor needs of a worker."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class LocalExecutor(Executor):
    """One worker, in this thread or in one of its own; the guard of lost rows stands in front of the worker."""

    def __init__(self, worker: PlanRunner, overlap: bool = False, arrivals: ArrivalBox | None = None,
                 expert_load: Callable[[], list[LayerLoad]] = list) -> None:
        """`arrivals`: where the worker's transfers report, if it has any. `expert_load`: what its experts have done."""
        self._worker = worker
        if arrivals is not None:
            self.arrivals = arrivals
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-worker") if overlap else None
        self._guard = LostRows()
        self._expert_load = expert_load

    def expert_load(self) -> list[LayerLoad]:
        return self._expert_load()

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
        sound = self._guard.sound(plan)
        try:
            return sound.whole(self._worker.execute(sound.plan))
        except BaseException:
            self._guard.lost(plan)
            raise

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._worker.close()
