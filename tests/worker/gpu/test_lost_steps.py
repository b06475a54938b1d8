"""Lost steps on the device worker: who was in them ends with an error, nobody else's tokens change."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.executor.lost_rows import REFUSED
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan, TableDiff
from quire.worker.gpu import results
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.worker import GpuWorker
from tests.worker.gpu.engines import QWEN3, make_engine, run, workload

TIGHT: dict[str, Any] = {"num_blocks": 26, "budget": 24}
"""A pool for which requests fight, so that rows and blocks change hands all the time."""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run(make_engine(QWEN3, device=False), workload(3, 12))


def lose_at_launch(core: EngineCore, lost: int) -> None:
    """Nothing of the step reaches the device, not even its tables."""
    worker: GpuWorker = core.executor._worker  # type: ignore[attr-defined]
    launch = worker._runner.run

    def stumble(plan: StepPlan) -> PendingStep:
        if plan.step == lost:
            raise RuntimeError("the launch failed")
        return launch(plan)

    worker._runner.run = stumble  # type: ignore[method-assign]


def lose_at_collect(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """All of the step ran, and its result cannot be read."""
    assemble = results._assemble

    def stumble(pending: PendingStep) -> Any:
        if pending.step == lost:
            raise RuntimeError("the result was unreadable")
        return assemble(pending)

    monkeypatch.setattr(results, "_assemble", stumble)


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_lost_step_changes_no_token_of_anybody_else(where: str, depth: int, plain: dict[str, Any],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    for lost in range(2, 50, 9):
        core = make_engine(QWEN3, device=True, depth=depth, **TIGHT)
        with monkeypatch.context() as patch:
            if where == "launch":
                lose_at_launch(core, lost)
            else:
                lose_at_collect(patch, lost)
            found = run(core, workload(3, 12))
        core.scheduler.check()
        core.close()
        wrong = [name for name, each in found.items() if each[3] is None and each != plain[name]]
        assert not wrong, f"losing step {lost} changed {wrong}"
        failed = [each[3] for each in found.values() if each[3] is not None]
        assert all("failed" in error or "lost" in error for error in failed)
        failures += len(failed)
    assert failures > 3


def started(row: int, first: int) -> RowStart:
    return RowStart(row, list(range(first, first + 24)), 24, SamplingParams(temperature=0.0), 1, 0)


def tokens_of_the_heir(executor: Executor) -> tuple[list[int], str | None]:
    """Its tokens, and the error of row 0 in step 4.

    Row 0 changes hands in step 3, and in step 4 row 1 grows into the last block of row 0's former owner.
    """
    executor.submit(StepPlan(1, starts=[started(0, 0)], diffs=[TableDiff(0, 0, 0, [4, 5, 6])],
                             entries=[PlanEntry(0, 0, 24, sample=True)]))
    drawn = [executor.submit(StepPlan(2, starts=[started(1, 30)], diffs=[TableDiff(1, 0, 0, [7, 8, 9])],
                                      entries=[PlanEntry(1, 0, 24, True)]))]
    executor.submit(StepPlan(3, freed_rows=[0], starts=[started(0, 60)], diffs=[TableDiff(0, 0, 0, [10, 11, 12])],
                             entries=[PlanEntry(0, 0, 8, False)]))
    late = executor.submit(StepPlan(4, diffs=[TableDiff(1, 0, 3, [6])],
                                    entries=[PlanEntry(0, 8, 16, True), PlanEntry(1, 24, 1, True)]))
    drawn += [executor.submit(StepPlan(step, entries=[PlanEntry(1, 20 + step, 1, True)])) for step in range(5, 12)]
    found = [future.result(60).entries[-1].tokens[0] for future in (drawn[0], late, *drawn[1:])]
    return found, late.result().entries[0].error


def test_a_plan_after_a_lost_start_does_not_write_into_the_blocks_of_the_rows_former_owner() -> None:
    """Step 3 is lost at launch, so row 0 has the table of its former owner when step 4 comes to it."""
    core = make_engine(QWEN3, device=True)
    expected, error = tokens_of_the_heir(core.executor)
    assert error is None
    core.close()
    core = make_engine(QWEN3, device=True)
    lose_at_launch(core, 3)
    assert tokens_of_the_heir(core.executor) == (expected, REFUSED)
    core.close()
