"""Runs plans on ranks in other processes: each plan is written once for all, and the rank that draws answers."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quire.errors import EngineDeadError, QuireError
from quire.executor.base import Executor
from quire.executor.lost_rows import LostRows, launch_sound
from quire.parallel.place import Place
from quire.ranks.frames import ConnectionLost, Kind
from quire.ranks.group import RankGroup
from quire.ranks.plan_codec import Learned, PlanEncoder
from quire.ranks.result_codec import decode_result
from quire.ranks.ring import RingWriter
from quire.ranks.tally import TransferTally
from quire.scheduler.plan import StepPlan, StepResult, TransferReport

_TICKS_TO_AGREE = 20
"""Looks after which ranks that did not fail in a step in which another did are waiting for that one in vain."""


@dataclass(slots=True)
class _Step:
    """A step under way."""

    number: int
    plan: StepPlan
    future: Future[StepResult]
    result: StepResult | None = None
    failed: dict[int, QuireError] = field(default_factory=dict)
    """By rank."""
    lost: QuireError | None = None
    ticks: int = 0


class RankExecutor(Executor):
    """Results come in the order of the plans. A step that failed on every rank alike is lost; one that failed on some
    leaves the others waiting inside it, and is the end of all ranks."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self._sampler = next(index for index, place in enumerate(places) if place.is_sampler)
        self._lock = threading.RLock()
        """Of what both the engine's thread and the one that listens to the ranks change."""
        self._encoder = PlanEncoder()
        self._guard = LostRows()
        self._tally = TransferTally(len(places))
        self._under_way: deque[_Step] = deque()
        self._submitted = 0
        self._learned: deque[tuple[int, Learned]] = deque()
        """Drawn tokens that earlier stages do not know yet, with the number of their step."""
        self._changed: dict[int, int] = {}
        """By row: the step that started or freed it last. Tokens of steps before are of its former owner."""
        self._pipelined = places[0].num_stages > 1
        self._group: RankGroup | None = None
        self._ring: RingWriter | None = None

    def connect(self, group: RankGroup, ring: RingWriter | None) -> None:
        """The ranks, and the ring to those of this machine, if there are any."""
        self._group, self._ring = group, ring

    @property
    def ranks(self) -> RankGroup:
        if self._group is None:
            raise EngineDeadError("the ranks of this engine have not been started")
        return self._group

    @property
    def quiet(self) -> bool:
        """No transfer is under way."""
        return not len(self._tally)

    @property
    def failure(self) -> EngineDeadError | None:
        return None if self._group is None else self._group.failure

    # ---- plans

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return launch_sound(self._guard, plan, self._launch)

    def _launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._submitted += 1
        step = _Step(self._submitted, plan, future)
        message = self._encoder.encode(plan, self._take_learned(plan))
        with self._lock:
            self._tally.start(plan.transfers)
            self._under_way.append(step)
        try:
            self._send(message)
        except (EngineDeadError, ConnectionLost) as error:
            self._give_up(str(error))
        if self.failure is not None:  # also when that happened before the step was in the queue
            self._give_up(str(self.failure))
        return future

    def _send(self, message: bytearray) -> None:
        group = self.ranks
        group.check()
        if self._ring is not None:
            self._ring.write(message, group.check)
        for handle in group.handles:
            if not handle.local:
                handle.link.send(Kind.PLAN, message)

    def _take_learned(self, plan: StepPlan) -> list[Learned]:
        """What earlier stages must know before this plan."""
        if not self._pipelined:
            return []
        found = []
        while self._learned:
            number, learned = self._learned.popleft()
            if self._changed.get(learned.row, 0) <= number:
                found.append(learned)
        for row in (*plan.freed_rows, *(start.row for start in plan.starts)):
            self._changed[row] = self._submitted
        return found

    # ---- what ranks say, on the thread that listens to them

    def result(self, data: bytes) -> None:
        result = decode_result(data)
        self.reports(self._sampler, result.arrivals)
        with self._lock:
            step = next(step for step in self._under_way if step.result is None and self._sampler not in step.failed)
            step.result = StepResult(result.step, result.entries)
            if self._pipelined:
                self._note_drawn(step, step.result)
            self._settle()

    def _note_drawn(self, step: _Step, result: StepResult) -> None:
        for entry, drawn in zip(step.plan.entries, result.entries, strict=True):
            if drawn.tokens:
                position = entry.start + entry.num_tokens - entry.num_drafts
                self._learned.append((step.number, Learned(entry.row, position, drawn.tokens)))

    def reports(self, rank: int, reports: list[TransferReport]) -> None:
        for report in reports:
            with self._lock:
                whole = self._tally.take(rank, report)
            if whole is not None:
                self.arrivals.put(whole)

    def step_failed(self, rank: int, number: int, error: QuireError, in_step: bool) -> None:
        with self._lock:
            step = next((step for step in self._under_way if step.number == number), None)
            if step is not None:
                step.failed[rank] = error
                if len(step.failed) == len(self.places) or (in_step and rank == self._sampler):
                    step.lost = error
                    self._settle()
                return
        # The others have told each other already that this step failed, or one of them was alone with it.
        if not in_step:
            self.ranks.lose(rank, f"it failed in a step that was over: {error}")

    def tick(self) -> None:
        with self._lock:
            step = next((step for step in self._under_way if step.failed and step.lost is None), None)
        if step is not None:
            step.ticks += 1
            if step.ticks > _TICKS_TO_AGREE:
                rank, error = next(iter(step.failed.items()))
                self.ranks.lose(rank, f"it failed in a step that others are waiting in: {error}")

    def died(self, error: EngineDeadError) -> None:
        self._give_up(str(error))

    def _settle(self) -> None:
        """Futures of the steps that are over, in their order."""
        while self._under_way:
            step = self._under_way[0]
            if step.result is None and step.lost is None:
                return
            self._under_way.popleft()
            if not step.future.set_running_or_notify_cancel():
                continue
            if step.lost is not None:
                step.future.set_exception(step.lost)
            elif step.result is not None:
                step.future.set_result(step.result)

    def _give_up(self, why: str) -> None:
        """Nothing that is under way will end by itself."""
        with self._lock:
            steps, reports = list(self._under_way), self._tally.give_up(why)
            self._under_way.clear()
        for step in steps:
            if step.future.set_running_or_notify_cancel():
                step.future.set_exception(EngineDeadError(why))
        for report in reports:
            self.arrivals.put(report)
        self.arrivals.ring()

    def end_plans(self) -> None:
        """Tell ranks that read the ring that no plan follows."""
        if self._ring is not None:
            self._ring.write(b"", self.ranks.check)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def describe(self) -> list[dict[str, Any]]:
        """What is known of every rank, as plain data."""
        return [{"index": state.place.index, "stage": state.place.stage, "tensor_rank": state.place.tensor_rank,
                 "pid": state.pid, "memory": state.memory, "steps": state.steps, "busy_ns": state.busy_ns,
                 "waited_ns": state.waited_ns, "times": list(state.times)} for state in self.ranks.states]
