"""A rank: builds its worker, carries out plans as they come, and tells the engine what came of them."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from quire.errors import QuireError, StepError
from quire.kernels.routing import LayerLoad
from quire.ranks.connections import MadeForOthers, open_collectives, open_memory
from quire.ranks.frames import ConnectionLost, FrameSocket, Kind
from quire.ranks.plan_codec import PlanDecoder
from quire.ranks.rank_kv import RankKV
from quire.ranks.result_codec import encode_reports, encode_result
from quire.ranks.ring import RingReader
from quire.ranks.start import RankStart
from quire.ranks.workers import RankWorker, build_rank_worker
from quire.scheduler.plan import StepResult

if TYPE_CHECKING:
    from quire.parallel.collectives import Collectives

PULSE_SECONDS = 0.25
_WAIT_SECONDS = 1.0
_STEPS_SHOWN = 512
"""Steps whose times go with one pulse."""


class PlanSource(Protocol):
    def read(self, seconds: float) -> bytes | None: ...


class _Messages:
    """Plans that come through the connection."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self.put = self._queue.put

    def read(self, seconds: float) -> bytes | None:
        return self._queue.get()


class Pulse(threading.Thread):
    """Signs of life from a thread of its own, with what the rank has done so far."""

    def __init__(self, link: FrameSocket, leave: Callable[[], None]) -> None:
        super().__init__(name="quire-pulse", daemon=True)
        self._link, self._leave = link, leave
        self.steps = 0
        self.busy_ns = 0
        self.ended = 0
        """When the last step was over: those after it may have been launched before."""
        self.waited_ns = 0
        self.stages_waited_ns = 0
        self.recent: deque[tuple[int, float, float]] = deque(maxlen=_STEPS_SHOWN)
        """Plan, begin and end of steps that were not told yet."""
        self.experts: Callable[[], list[LayerLoad]] = list
        self.device_bytes: Callable[[], int] = int

    def run(self) -> None:
        while True:
            time.sleep(PULSE_SECONDS)
            try:
                self.tell()
            except ConnectionLost:
                self._leave()
                return

    def tell(self) -> None:
        self._link.tell(Kind.PULSE, self._content())

    def step_over(self, number: int, plan: int, began: int, collectives: Collectives | None) -> None:
        """A step's time begins where it waits no more for the stage before: what is left is its stage's work."""
        ended, waited = time.monotonic_ns(), 0
        began = max(began, self.ended)
        self.steps, self.ended = number, ended
        self.busy_ns += ended - began
        if collectives is not None:
            self.waited_ns, before = collectives.waited_ns, self.stages_waited_ns
            self.stages_waited_ns = collectives.stages_waited_ns
            waited = self.stages_waited_ns - before
        self.recent.append((plan, min(began + waited, ended) / 1e9, ended / 1e9))

    def _content(self) -> dict[str, Any]:
        times = []
        while self.recent:
            times.append(self.recent.popleft())
        return {"steps": self.steps, "busy_ns": self.busy_ns, "waited_ns": self.waited_ns,
                "memory": self.device_bytes() or _resident_bytes(), "times": times,
                "experts": [(load.layer, load.rows) for load in self.experts()]}


@dataclass(slots=True)
class _StepUnderWay:
    number: int
    began: int
    is_sampler: bool
    collectives: Collectives | None
    kv: RankKV
    step: int = 0


class Rank:
    """Runs on the main thread; a second one listens to the engine and ends the process when that has gone."""

    def __init__(self, link: FrameSocket, leave: Callable[[], None] | None = None) -> None:
        """`leave`: what to do when the engine has gone; by default the process ends, whatever it is doing."""
        self._link = link
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        self._messages = _Messages()
        self._leave = self._leave_process if leave is None else leave
        self._pulse = Pulse(link, self._leave)
        self._kv: RankKV | None = None

    def _leave_process(self) -> None:
        os._exit(0)

    def run(self) -> int:
        """Until the engine closes the connection, or the rank cannot start; the exit code."""
        try:
            return self._run()
        except ConnectionLost:  # also when others failed to start before this one: nobody asks for a second reason
            self._leave()
            return 1

    def _run(self) -> int:
        made = MadeForOthers()
        kind, data = self._link.receive()
        while kind is Kind.MAKE:
            self._link.tell(Kind.MADE, made.make(json.loads(data)))
            kind, data = self._link.receive()
        if kind is not Kind.START:
            return 1
        threading.Thread(target=self._listen, name="quire-listen", daemon=True).start()
        self._pulse.start()
        start = RankStart.from_json(data)
        try:
            collectives = open_collectives(start, made)
            worker = build_rank_worker(start, collectives, self._agree)
        except BaseException as error:  # also KeyboardInterrupt: the engine waits for an answer
            self._link.tell(Kind.FAILED, _described(error))
            return 1
        source: PlanSource = self._messages
        if start.ring is not None:
            source = RingReader(open_memory(start.ring), start.reader, start.num_readers, start.spin_seconds,
                                start.core)
        self._pulse.device_bytes = worker.device_bytes
        worker.arrivals.on_ring = lambda: self._report(worker)
        if start.place.tensor_rank == 0:
            self._pulse.experts = worker.expert_load
        self._kv = kv = RankKV(worker.kv_memory, lambda told: self._link.tell(Kind.KV_DONE, told))
        self._pulse.tell()  # which layers have experts: who asks a ready engine is told of all of them
        self._link.send(Kind.READY)
        try:
            self._carry_out(source, start, worker, collectives, kv)
        finally:
            kv.close()
            if worker.launch is None:  # a GPU's memory goes with its process
                worker.close()
        return 0

    def _carry_out(self, source: PlanSource, start: RankStart, worker: RankWorker,
                   collectives: Collectives | None, kv: RankKV) -> None:
        decoder, number = PlanDecoder(), 0
        learns = not start.place.is_last
        while True:
            step = _StepUnderWay(number + 1, 0, start.place.is_sampler, collectives, kv)
            data = source.read(_WAIT_SECONDS)
            if data is None:
                continue
            if not data:
                return
            number, step.began = number + 1, time.monotonic_ns()
            try:
                plan, learned = decoder.decode(data)
                step.step = plan.step
                for each in learned if learns else ():
                    worker.learn(each.row, each.position, each.tokens)
                step.began = time.monotonic_ns()
                if worker.launch is None:
                    result = worker.execute(plan)
                else:
                    worker.launch(plan).add_done_callback(partial(self._launched, step))
                    continue
            except Exception as error:
                self._over(step, error)
            else:
                self._over(step, result)
                decoder.prepare()

    def _launched(self, step: _StepUnderWay, future: Future[StepResult]) -> None:
        """On the thread that waits for the device."""
        error = future.exception()
        try:
            self._over(step, future.result() if error is None else error)
        except ConnectionLost:
            self._leave()

    def _over(self, step: _StepUnderWay, found: StepResult | BaseException) -> None:
        """What came of a step, to whoever has to know."""
        self._pulse.step_over(step.number, step.step, step.began, step.collectives)
        step.kv.step_over(step.number)
        if isinstance(found, BaseException):
            self._link.tell(Kind.STEP_FAILED, {"number": step.number, **_described(found)})
        elif step.is_sampler:
            self._link.send(Kind.RESULT, encode_result(found))
        elif found.arrivals:
            self._link.send(Kind.REPORTS, encode_reports(found.arrivals))

    def _listen(self) -> None:
        try:
            while True:
                kind, data = self._link.receive()
                if kind is Kind.PLAN:
                    self._messages.put(data)
                elif kind is Kind.AGREED:
                    self._answers.put(data)
                elif kind is Kind.KV_JOB and self._kv is not None:
                    self._kv.take(json.loads(data))
        except ConnectionLost:
            self._leave()

    def _agree(self, mine: dict[str, Any]) -> dict[str, Any]:
        self._link.tell(Kind.SIZED, mine)
        agreed: dict[str, Any] = json.loads(self._answers.get())
        return agreed

    def _report(self, worker: RankWorker) -> None:
        reports = worker.arrivals.take()
        if reports:
            self._link.send(Kind.REPORTS, encode_reports(reports))


def _described(error: BaseException) -> dict[str, Any]:
    """An error for the engine, which raises it there as what it was."""
    known = isinstance(error, QuireError)
    return {"kind": type(error).__name__ if known else "", "field": getattr(error, "field", None),
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "in_step": isinstance(error, StepError),
            "trace": "" if known else "".join(traceback.format_exception(error))}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
