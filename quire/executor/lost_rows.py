"""Rows that a lost step left behind: later entries of theirs are refused, on every executor by the same rule.

A plan describes rows by what changed since the plan before. If that one was lost, the tables of its rows may still be
those of their former owners, and to compute such a row would write into somebody else's blocks. Plans made before the
loss was known may speak of such rows; starting a row anew mends it.

Which entries are refused depends on the plans and on which of them were lost, and on nothing else: ranks that are told
of the same losses refuse the same entries.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace

from quire.scheduler.plan import EntryResult, PlanEntry, StepPlan, StepResult

REFUSED = "an earlier step of this request was lost"


@dataclass(slots=True)
class SoundPlan:
    """What may be run of a plan, and which of its entries may not."""

    plan: StepPlan
    refused: tuple[bool, ...] = ()
    """By entry of the whole plan; empty: none."""

    def whole(self, result: StepResult) -> StepResult:
        """The result of the whole plan: refused entries have an error."""
        if not self.refused:
            return result
        entries = iter(result.entries)
        whole = [EntryResult(error=REFUSED) if lost else next(entries) for lost in self.refused]
        return StepResult(result.step, whole, result.arrivals)


class LostRows:
    """The guard of one row table. It is asked about every plan, in the order in which the table sees them."""

    def __init__(self, told: bool = False) -> None:
        """`told`: whoever settles the futures of plans sets `troubled` before one of them fails. Then nobody has to
        look at them before a plan is launched, which takes a while (futures have locks)."""
        self.troubled = not told
        """A plan may have been lost that this table was not told of."""
        self._rows: set[int] = set()
        self._started: dict[int, int] = {}
        """By row: the step that started it last."""
        self._watched: list[tuple[StepPlan, Future[StepResult]]] = []
        self._over: list[tuple[StepPlan, Future[StepResult]]] = []
        """Let go of once the next plan is on its way: to free a large plan and its result takes a while."""

    def sound(self, plan: StepPlan) -> SoundPlan:
        """What may be run of the plan that comes next."""
        if self.troubled:
            self._look_for_losses()
        for start in plan.starts:
            self._started[start.row] = plan.step
            self._rows.discard(start.row)
        refused = tuple(self._refuses(entry) for entry in plan.entries) if self._rows else ()
        if True not in refused:
            return SoundPlan(plan)
        entries = [entry for entry, lost in zip(plan.entries, refused, strict=True) if not lost]
        diffs = [diff for diff in plan.diffs if diff[0] not in self._rows]
        return SoundPlan(replace(plan, entries=entries, diffs=diffs, decoding=None), refused)

    def _refuses(self, entry: PlanEntry) -> bool:
        return entry.row in self._rows or entry.shares in self._rows

    def lost(self, plan: StepPlan) -> None:
        """The plan was lost: nobody knows what its rows are now, but for those that a later plan has started."""
        rows = {entry.row for entry in plan.entries} | {start.row for start in plan.starts}
        self._rows.update(row for row in rows if self._started.get(row, plan.step) <= plan.step)

    def watch(self, plan: StepPlan, future: Future[StepResult]) -> None:
        """A plan under way: should its future fail, it was lost, whatever was launched after it meanwhile."""
        self._over = []
        if not self.troubled:  # else that was done before the plan was launched
            self._look_for_losses()
        self._watched.append((plan, future))

    def _look_for_losses(self) -> None:
        under_way = []
        for plan, future in self._watched:
            if not future.done():
                under_way.append((plan, future))
            elif _failed(future):
                self.lost(plan)
        self._over, self._watched = self._watched, under_way


def _failed(future: Future[StepResult]) -> bool:
    """Of one that is done; whoever cancelled one has not lost it."""
    try:
        return future.exception() is not None
    except CancelledError:
        return False


def launch_sound(guard: LostRows, plan: StepPlan,
                 launch: Callable[[StepPlan], Future[StepResult]]) -> Future[StepResult]:
    """Launch what is sound of a plan; the future is of the whole plan."""
    sound = guard.sound(plan)
    try:
        future = launch(sound.plan)
    except Exception as error:
        guard.troubled = True
        future = Future()
        future.set_exception(error)
    except BaseException:
        guard.lost(plan)
        raise
    guard.watch(plan, future)
    return future if not sound.refused else _mapped(future, sound.whole)


def _mapped(future: Future[StepResult], change: Callable[[StepResult], StepResult]) -> Future[StepResult]:
    """A future of the changed result."""
    changed: Future[StepResult] = Future()

    def settle(done: Future[StepResult]) -> None:
        if done.cancelled():
            changed.cancel()
        elif changed.set_running_or_notify_cancel():
            error = done.exception()
            if error is None:
                changed.set_result(change(done.result()))
            else:
                changed.set_exception(error)

    future.add_done_callback(settle)
    return changed
