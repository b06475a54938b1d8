"""Runs plans on ranks in other processes: each plan is written once for all, and the rank that draws answers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quire.errors import EngineDeadError, QuireError
from quire.executor.base import Executor, RankFacts
from quire.executor.lost_rows import LostRows, launch_sound
from quire.kernels.routing import LayerLoad
from quire.parallel.place import Place
from quire.ranks.frames import ConnectionLost, Kind
from quire.ranks.group import RankGroup
from quire.ranks.plan_codec import Learned, PlanEncoder
from quire.ranks.result_codec import decode_result
from quire.ranks.ring import RingWriter
from quire.ranks.tally import TransferTally
from quire.scheduler.plan import StepPlan, StepResult, TransferReport, TransferStart

_TICKS_TO_AGREE = 20
"""Looks after which ranks that did not fail in a step in which another did are waiting for that one in vain."""


@dataclass(slots=True)
class _Step:
    """A step under way."""

    number: int
    plan: StepPlan = field(default_factory=lambda: StepPlan(0))
    future: Future[StepResult] = field(default_factory=Future)
    result: StepResult | None = None
    failed: dict[int, QuireError] = field(default_factory=dict)
    """By rank."""
    lost: QuireError | None = None
    ticks: int = 0


class KVListener(Protocol):
    """Who hears what came of jobs with the ranks' KV (`shared_kv.py`), on the thread that listens to them."""

    def answered(self, rank: int, told: dict[str, Any]) -> None: ...

    def lost(self, why: str) -> None: ...


class TierTransfer(Protocol):
    """Moves blocks to and from a tier that is kept in the engine's own process, through jobs with the ranks' KV."""

    name: str

    def start(self, transfer: TransferStart, report: Callable[[TransferReport], None]) -> None: ...

    def cancel(self, number: int) -> None: ...

    def close(self) -> None: ...


class RankExecutor(Executor):
    """Results come in the order of the plans. A step that failed on every rank alike is lost; one that failed on some
    leaves the others waiting inside it, and is the end of all ranks."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self._sampler = next(index for index, place in enumerate(places) if place.is_sampler)
        self._lock = threading.RLock()
        """Of what both the engine's thread and the one that listens to the ranks change."""
        self._encoder = PlanEncoder()
        self._guard = LostRows(told=True)
        self._tally = TransferTally(len(places))
        self._under_way: deque[_Step] = deque()
        self._next = _Step(1)
        """Made while the plan before it is carried out: a future takes a while to make."""
        self._learned: deque[tuple[int, Learned]] = deque()
        """Drawn tokens that earlier stages do not know yet, with the number of their step."""
        self._changed: dict[int, int] = {}
        """By row: the step that started or freed it last. Tokens of steps before are of its former owner."""
        self._pipelined = places[0].num_stages > 1
        self._group: RankGroup | None = None
        self._ring: RingWriter | None = None
        self._kv: KVListener | None = None
        self._tiers: dict[str, TierTransfer] = {}
        self._steps_over = 0

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

    # ---- KV beside the steps

    @property
    def num_ranks(self) -> int:
        return len(self.places)

    @property
    def steps_over(self) -> int:
        return self._steps_over

    def tell_kv(self, rank: int, job: dict[str, Any]) -> None:
        """Have a rank copy KV between its blocks and shared memory; what came of it is told to the listener."""
        self.ranks.check()
        self.ranks.handles[rank].link.tell(Kind.KV_JOB, job)

    def listen_to_kv(self, listener: KVListener) -> None:
        self._kv = listener

    def add_tier(self, transfer: TierTransfer) -> None:
        """Transfers of this tier are made here, and not by every rank for itself."""
        self._tiers[transfer.name] = transfer

    def kv_done(self, rank: int, told: dict[str, Any]) -> None:
        if self._kv is not None:
            self._kv.answered(rank, told)

    def _start_here(self, plan: StepPlan) -> None:
        """What a plan wants of the tiers that are kept here."""
        for transfer in self._tiers.values():
            for number in plan.cancels:
                transfer.cancel(number)
        for start in plan.transfers:
            if start.tier in self._tiers:
                self._tiers[start.tier].start(start, self.arrivals.put)

    # ---- plans

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._ring is not None:
            self._ring.wake()
        return launch_sound(self._guard, plan, self._launch)

    def _launch(self, plan: StepPlan) -> Future[StepResult]:
        """Ranks wait for all that comes before the message is sent, so what can be done afterwards is."""
        theirs, step = plan, self._next
        if self._tiers:
            theirs = replace(plan, transfers=[each for each in plan.transfers if each.tier not in self._tiers])
        message = self._encoder.encode(theirs, self._take_learned(plan, step.number) if self._pipelined else ())
        step.plan = plan
        with self._lock:
            if theirs.transfers:
                self._tally.start(theirs.transfers)
            self._under_way.append(step)
        try:
            self._send(message)
        except (EngineDeadError, ConnectionLost) as error:
            self._give_up(str(error))
        finally:
            self._next = _Step(step.number + 1)
        if self.failure is not None:  # also when that happened before the step was in the queue
            self._give_up(str(self.failure))
        self._encoder.prepare()
        self._start_here(plan)
        return step.future

    def _send(self, message: bytes) -> None:
        group = self._group or self.ranks
        if group.failure is not None:
            raise group.failure
        if self._ring is not None:
            self._ring.write(message, group.check)
        for handle in group.handles:
            if not handle.local:
                handle.link.send(Kind.PLAN, message)

    def _take_learned(self, plan: StepPlan, number: int) -> list[Learned]:
        """What earlier stages must know before this plan, which is the step `number`."""
        found = []
        while self._learned:
            drawn_in, learned = self._learned.popleft()
            if self._changed.get(learned.row, 0) <= drawn_in:
                found.append(learned)
        for row in (*plan.freed_rows, *(start.row for start in plan.starts)):
            self._changed[row] = number
        return found

    # ---- what ranks say, on the thread that listens to them

    def result(self, data: bytes) -> None:
        if self._ring is not None and self._ring.readers_spin:
            self._ring.announce()  # to get up takes longer than to read the next plan
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
            self._steps_over = step.number
            if not step.future.set_running_or_notify_cancel():
                continue
            if step.lost is not None:
                self._guard.troubled = True
                step.future.set_exception(step.lost)
            elif step.result is not None:
                step.future.set_result(step.result)

    def _give_up(self, why: str) -> None:
        """Nothing that is under way will end by itself."""
        with self._lock:
            steps, reports = list(self._under_way), self._tally.give_up(why)
            self._under_way.clear()
        self._guard.troubled = True
        if self._kv is not None:
            self._kv.lost(why)
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
        for transfer in self._tiers.values():
            transfer.close()
        if self._group is not None:
            self._group.close()
        if self._kv is not None:
            self._kv.lost("the engine is closed")

    def describe_ranks(self) -> list[RankFacts]:
        return [RankFacts(state.place.index, state.place.stage, state.place.tensor_rank, state.memory, state.steps,
                          state.busy_ns / 1e9, state.waited_ns / 1e9, tuple(state.times))
                for state in self.ranks.states]

    def expert_load(self) -> list[LayerLoad]:
        return [load for state in self.ranks.states for load in state.experts]
