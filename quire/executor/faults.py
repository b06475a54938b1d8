"""Runs plans on KV that is numbers, with faults on demand: lost steps, and transfers that fail, dawdle or stutter."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from quire.errors import InvariantError
from quire.executor.base import Executor
from quire.executor.kv_hash import BlockStore
from quire.executor.kv_hash_worker import KVHashWorker
from quire.executor.lost_rows import LostRows
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import StepPlan, StepResult, TransferReport, TransferStart

AT_LAUNCH, HALFWAY, AT_COLLECT = "launch", "halfway", "collect"
"""Where a step is lost: before anything of it was done, in the middle, or when only its result is missing."""


@dataclass(frozen=True, slots=True)
class TransferFault:
    """How one transfer behaves. By default it is made at once and reported with its step."""

    delay: int = 0
    """Ticks before it begins. There is one for every plan and one whenever the core looks for arrivals."""
    moves_a_tick: int = 0
    """0: all at once."""
    fails_after: int | None = None
    """Moves that are made before it fails."""
    reports_twice: bool = False
    ignores_cancel: bool = False


@dataclass(slots=True)
class Faults:
    """What goes wrong: by number of the step, and by number of the transfer."""

    lost_steps: Mapping[int, str] = field(default_factory=dict)
    transfers: Mapping[int, TransferFault] = field(default_factory=dict)


@dataclass(slots=True)
class _UnderWay:
    start: TransferStart
    fault: TransferFault
    waits: int
    num_done: int = 0


class FaultyExecutor(Executor):
    """Steps run when they are submitted; transfers go on with every tick. One thread, and no clock."""

    def __init__(self, worker: KVHashWorker, tiers: Mapping[str, list[BlockStore]], faults: Faults | None = None,
                 guard: LostRows | None = None) -> None:
        """`tiers`: by name, the blocks of every cache group."""
        self.worker = worker
        self._tiers = tiers
        self._faults = faults or Faults()
        self._guard = guard or LostRows()
        self._under_way: dict[int, _UnderWay] = {}
        self._reports: list[TransferReport] = []
        self._lost_late: list[StepPlan] = []
        self.hit: set[int] = set()
        """Seeds of the sequences that had an entry in a lost step: nobody else may notice."""
        self.num_transfers = self.num_failed_transfers = 0
        self.arrivals = _TickingBox(self)

    # ---- steps

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        sound = self._guard.sound(plan)
        # A result that cannot be read is missed when the plan after it is under way already.
        for lost in self._lost_late:
            self._guard.lost(lost)
        self._lost_late.clear()
        where = self._faults.lost_steps.get(plan.step)
        try:
            result = self._execute(sound.plan, where)
        except InvariantError as error:
            self._guard.lost(plan)
            future.set_exception(error)
            return future
        if where is None:
            future.set_result(sound.whole(result))
            return future
        self._note_hit(plan)
        if where == AT_COLLECT:
            self._lost_late.append(plan)
        else:
            self._guard.lost(plan)
        future.set_exception(RuntimeError(f"lost at {where}"))
        return future

    def _execute(self, plan: StepPlan, where: str | None) -> StepResult:
        if where == AT_LAUNCH:
            self._reports += [TransferReport(start.number, 0, True, "never started") for start in plan.transfers]
            return StepResult(plan.step, [])
        self.worker.apply(plan)
        for start in plan.transfers:
            self._start(start)
        for number in plan.cancels:
            self._cancel(number)
        self._tick(begun=False)
        entries = plan.entries[: len(plan.entries) // 2] if where == HALFWAY else plan.entries
        results = self.worker.run(entries)
        self._tick()
        if where is not None:
            return StepResult(plan.step, [])  # the result is dropped: its reports are sent later
        reports, self._reports = self._reports, []
        return StepResult(plan.step, results, reports)

    def _note_hit(self, plan: StepPlan) -> None:
        starts = {start.row: start for start in plan.starts}
        for entry in plan.entries:
            owner = starts.get(entry.row) or self.worker.owner(entry.row)
            if owner is not None:
                self.hit.add(owner.seed)

    # ---- transfers

    def _start(self, start: TransferStart) -> None:
        fault = self._faults.transfers.get(start.number, TransferFault())
        self.num_transfers += 1
        self._under_way[start.number] = _UnderWay(start, fault, fault.delay)

    def _cancel(self, number: int) -> None:
        moving = self._under_way.get(number)
        if moving is not None and not moving.fault.ignores_cancel:
            self._end(moving, "cancelled")

    def _tick(self, begun: bool = True) -> None:
        """`begun` false: only transfers without delay, which are made before the forward pass of their plan."""
        for moving in list(self._under_way.values()):
            if moving.waits > 0:
                moving.waits -= begun
                continue
            self._advance(moving)

    def _advance(self, moving: _UnderWay) -> None:
        moves, fault = moving.start.moves, moving.fault
        until = len(moves) if not fault.moves_a_tick else min(len(moves), moving.num_done + fault.moves_a_tick)
        if fault.fails_after is not None:
            until = min(until, fault.fails_after)
        tier = self._tiers[moving.start.tier]
        for move in moves[moving.num_done : until]:
            here, there = self.worker.device[move.group], tier[move.group]
            if moving.start.out:
                there.put(move.tier, here.read(move.device))
            else:
                here.put(move.device, there.read(move.tier))
        moving.num_done = max(until, moving.num_done)
        if moving.num_done == len(moves):
            self._end(moving, None)
        elif fault.fails_after is not None and moving.num_done >= fault.fails_after:
            self.num_failed_transfers += 1
            self._end(moving, "the transfer failed")
        else:
            self._report(moving, TransferReport(moving.start.number, moving.num_done))

    def _end(self, moving: _UnderWay, error: str | None) -> None:
        del self._under_way[moving.start.number]
        self._report(moving, TransferReport(moving.start.number, moving.num_done, True, error))

    def _report(self, moving: _UnderWay, report: TransferReport) -> None:
        self._reports += [report] * (1 + moving.fault.reports_twice)

    def take_reports(self) -> list[TransferReport]:
        """The core looks for arrivals: a tick, and what there is to report."""
        self._tick()
        reports, self._reports = self._reports, []
        return reports

    @property
    def quiet(self) -> bool:
        """No transfer is under way or unreported."""
        return not self._under_way and not self._reports


class _TickingBox(ArrivalBox):
    """Looking for arrivals makes time pass, so nothing ever has to wait."""

    def __init__(self, executor: FaultyExecutor) -> None:
        super().__init__()
        self._executor = executor

    def take(self) -> list[TransferReport]:
        return super().take() + self._executor.take_reports()

    def wait(self, seconds: float) -> bool:
        return True
