"""Runs plans on a worker that launches and does not wait: the future of a step is the worker's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from quire.executor.base import Executor
from quire.executor.lost_rows import LostRows, launch_sound
from quire.kernels.routing import LayerLoad
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import StepPlan, StepResult


class PlanLauncher(Protocol):
    """What the executor needs of a worker whose `submit` returns before the step is done."""

    arrivals: ArrivalBox
    """Where its transfers report."""

    def submit(self, plan: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None: ...


class DeviceExecutor(Executor):
    """Plans reach the device in the order of `submit`, so that is where the guard of lost rows stands.

    A step may be lost when it is launched (its rows are refused from the next plan on) or only when its result is
    collected. Then it was launched whole and plans after it found its rows as they assumed; from the first plan after
    the failure on its rows are refused all the same.
    """

    def __init__(self, worker: PlanLauncher, expert_load: Callable[[], list[LayerLoad]] = list) -> None:
        self._worker = worker
        self._expert_load = expert_load
        self.arrivals = worker.arrivals
        self._guard = LostRows()

    def expert_load(self) -> list[LayerLoad]:
        return self._expert_load()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return launch_sound(self._guard, plan, self._worker.submit)

    def close(self) -> None:
        self._worker.close()
