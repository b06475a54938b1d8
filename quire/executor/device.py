"""Runs plans on a worker that launches and does not wait: the future of a step is the worker's own."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from quire.executor.base import Executor
from quire.scheduler.plan import StepPlan, StepResult


class PlanLauncher(Protocol):
    """What the executor needs of a worker whose `submit` returns before the step is done."""

    def submit(self, plan: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None: ...


class DeviceExecutor(Executor):
    def __init__(self, worker: PlanLauncher) -> None:
        self._worker = worker

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._worker.submit(plan)

    def close(self) -> None:
        self._worker.close()
