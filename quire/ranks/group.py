"""The engine's side of its ranks: starts them, listens to all of them on one thread, and notices when one is lost.

One lost rank is the end of all: the others wait for it in the middle of a step. They are killed, whatever is under way
fails with the reason, and whoever runs the engine may start a new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire import errors
from quire.errors import ConfigError, EngineDeadError, EngineError, QuireError
from quire.kernels.routing import LayerLoad
from quire.parallel.place import Place
from quire.ranks.frames import ConnectionLost, Kind
from quire.ranks.launch import RankHandle
from quire.ranks.result_codec import decode_reports
from quire.ranks.start import place_name
from quire.scheduler.plan import TransferReport

log = logging.getLogger("quire.ranks")

_LOOK_SECONDS = 0.25
_SILENT_SECONDS = 1.75
"""How long a rank may say nothing whose process has ended or was stopped. Looking at it leaves no doubt, so this is
time by the clock; what it had said before lies in its socket, and was heard before anybody looks."""
_STOPPED_SECONDS = 0.75
"""For how long it must have been found stopped: whoever samples a process's stacks stops it for moments."""
# How long others may, beyond the half second in which pulses come, not counting time in which nobody listened.
_SILENT_UNSEEN_SECONDS = 2.0
"""On another machine, where nobody can look at its process: stopped, lost and starved look the same from here."""
_SILENT_BUSY_SECONDS = 20.0
"""Whose process runs: its machine is starved, or it does something that keeps all its threads waiting."""
_START_SILENT_SECONDS = 120.0
"""That starts, wherever it is: loading libraries may hold up its pulse."""
_LAST_WORDS_SECONDS = 0.5
_CLOSE_SECONDS = 3.0
_STEPS_KEPT = 512


@dataclass(slots=True)
class RankState:
    """What is known of one rank."""

    place: Place
    pid: int = 0
    heard: float = field(default_factory=time.monotonic)
    silence: float = 0.0
    stopped_since: float | None = None
    """When a look first found it stopped, and every one since."""
    ready: bool = False
    sized: dict[str, Any] | None = None
    steps: int = 0
    busy_ns: int = 0
    waited_ns: int = 0
    memory: int = 0
    times: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    """Plan, begin and end of its latest steps' work, in seconds of the monotonic clock."""
    experts: list[LayerLoad] = field(default_factory=list)
    """Of the first tensor rank of each stage: what the experts of its layers have done."""


class Launcher(Protocol):
    """Starts ranks. All calls come from the thread that watches them."""

    places: list[Place]

    def start(self) -> list[RankHandle]:
        """In the order of `places`, each told what it is to run."""

    def close(self) -> None:
        """Let go of what the ranks shared, once they have ended."""


class GroupListener(Protocol):
    """Who hears what ranks say, on the thread that listens to them."""

    def result(self, data: bytes) -> None: ...

    def step_failed(self, rank: int, number: int, error: QuireError, in_step: bool) -> None: ...

    def reports(self, rank: int, reports: list[TransferReport]) -> None: ...

    def kv_done(self, rank: int, told: dict[str, Any]) -> None:
        """What came of a job with its KV."""

    def tick(self) -> None:
        """A moment has passed."""

    def died(self, error: EngineDeadError) -> None: ...


class RankGroup(threading.Thread):
    """All ranks of an engine. The thread that watches them also starts them: they end when it does."""

    def __init__(self, launcher: Launcher, agree: Callable[[list[dict[str, Any]]], dict[str, Any]],
                 listener: GroupListener) -> None:
        super().__init__(name="quire-ranks", daemon=True)
        self._launcher, self._agree, self._listener = launcher, agree, listener
        self.states = [RankState(place) for place in launcher.places]
        self.handles: list[RankHandle] = []
        self.failure: EngineDeadError | None = None
        """Why no plan can be carried out any more."""
        self.ready: Future[dict[str, Any]] = Future()
        """What the ranks have agreed on, once all of them wait for plans."""
        self._agreed: dict[str, Any] | None = None
        self._closing = False
        self._wake = threading.Event()
        self._poll = select.epoll()
        self._by_fd: dict[int, int] = {}
        self._looked_at = 0.0

    # ---- for the engine

    def check(self) -> None:
        """Raises what ended the ranks, if they have ended."""
        if self.failure is not None:
            raise self.failure

    def lose(self, rank: int, why: str, error: QuireError | None = None) -> None:
        """One rank is lost, so all are. On the thread that watches them."""
        if self.failure is not None or self._closing:
            return
        message = f"{place_name(self.states[rank].place)}: {why}"
        self.failure = EngineDeadError(f"the ranks of this engine were lost: {message}")
        self._kill()
        if not self.ready.done():
            self.ready.set_exception(EngineError(f"the engine did not start: {message}") if error is None else error)
        else:
            log.error("%s", self.failure)
        self._listener.died(self.failure)

    def close(self) -> None:
        """End all ranks and wait for that. Idempotent."""
        self._closing = True
        self._wake.set()
        if self.is_alive():
            self.join()

    # ---- the thread

    def run(self) -> None:
        try:
            self.handles = self._launcher.start()
            for index, handle in enumerate(self.handles):
                self.states[index].pid = handle.pid
                self._by_fd[handle.link.fileno()] = index
                self._poll.register(handle.link.fileno(), select.EPOLLIN)
            self._looked_at = time.monotonic()
            while not self._closing and self.failure is None:
                self._pump()
            self._wake.wait()
        except QuireError as error:
            self._never_started(error)
        except Exception as error:
            log.exception("the thread that watches the ranks failed")
            self._never_started(EngineError(f"the ranks could not be watched: {type(error).__name__}: {error}"))
        finally:
            self._end()

    def _never_started(self, error: QuireError) -> None:
        self.failure = EngineDeadError(str(error))
        if not self.ready.done():
            self.ready.set_exception(error)
        self._listener.died(self.failure)

    def _pump(self) -> None:
        for fd, _ in self._poll.poll(_LOOK_SECONDS):
            rank = self._by_fd.get(fd)
            if rank is not None and self.failure is None:
                self._hear(rank)
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._look()
            self._listener.tick()

    def _hear(self, rank: int) -> None:
        state = self.states[rank]
        try:
            frames = self.handles[rank].link.take()
            state.heard = time.monotonic()
            for kind, data in frames:
                self._take(rank, kind, data)
        except ConnectionLost as error:
            self.lose(rank, self.handles[rank].ended(_LAST_WORDS_SECONDS) or str(error))
        except (ValueError, KeyError) as error:
            self.lose(rank, f"it sent a message that cannot be read ({error})")

    def _take(self, rank: int, kind: Kind, data: bytes) -> None:
        state = self.states[rank]
        if kind is Kind.RESULT:
            self._listener.result(data)
        elif kind is Kind.PULSE:
            pulse = json.loads(data)
            state.steps, state.busy_ns, state.waited_ns = pulse["steps"], pulse["busy_ns"], pulse["waited_ns"]
            state.memory = pulse["memory"]
            state.times.extend(map(tuple, pulse["times"]))
            state.experts = [LayerLoad(layer, tuple(rows)) for layer, rows in pulse["experts"]]
        elif kind is Kind.REPORTS:
            self._listener.reports(rank, decode_reports(data))
        elif kind is Kind.KV_DONE:
            self._listener.kv_done(rank, json.loads(data))
        elif kind is Kind.STEP_FAILED:
            told = json.loads(data)
            self._listener.step_failed(rank, told["number"], _as_error(told), told["in_step"])
        elif kind is Kind.SIZED:
            state.sized = json.loads(data)
            self._settle()
        elif kind is Kind.READY:
            state.ready = True
            if all(each.ready for each in self.states) and self._agreed is not None:
                self.ready.set_result(self._agreed)
        elif kind is Kind.FAILED:
            self._failed_to_start(rank, json.loads(data))

    def _settle(self) -> None:
        """When all have said what they can hold: the same for all."""
        sizes = [state.sized for state in self.states]
        if all(size is not None for size in sizes):
            self._agreed = self._agree([size for size in sizes if size is not None])
            for handle in self.handles:
                handle.link.tell(Kind.AGREED, self._agreed)

    def _failed_to_start(self, rank: int, told: dict[str, Any]) -> None:
        """Once, for the first that fails: the others fail for the same reason, or because of it."""
        error = _as_error(told)
        if told["trace"]:
            log.error("%s failed while it started:\n%s", place_name(self.states[rank].place), told["trace"])
        # What is wrong with the options is no fault of one rank.
        if not isinstance(error, ConfigError):
            error.args = (f"{place_name(self.states[rank].place)}: {error}",)
        self.lose(rank, told["message"], error)

    # ---- whether they live

    def _look(self) -> None:
        now = time.monotonic()
        # If this thread itself was held up, messages lie unread: that time does not count against the ranks.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * _LOOK_SECONDS), now
        for rank, (state, handle) in enumerate(zip(self.states, self.handles, strict=True)):
            if self.failure is not None:
                return
            state.silence = 0.0 if now - state.heard < 2 * _LOOK_SECONDS else state.silence + elapsed
            stopped = handle.stopped() if state.silence else False
            state.stopped_since = (state.stopped_since or now) if stopped else None
            if now - state.heard < _SILENT_SECONDS:
                continue
            ended = handle.ended(0.0)
            if ended is not None:
                self.lose(rank, ended)
                return
            silent = f"has given no sign of life for {now - state.heard:.1f} seconds"
            if state.stopped_since is not None and now - state.stopped_since >= _STOPPED_SECONDS:
                self.lose(rank, f"it was stopped and {silent}")
            elif not stopped and state.silence >= _patience(state.ready, seen=stopped is not None):
                self.lose(rank, f"it {silent}")

    def _kill(self) -> None:
        for fd in self._by_fd:
            with contextlib.suppress(OSError):  # closed already
                self._poll.unregister(fd)
        self._by_fd.clear()
        for handle in self.handles:
            handle.kill()

    def _end(self) -> None:
        for handle in self.handles:
            handle.end()
        until = time.monotonic() + _CLOSE_SECONDS
        for handle in self.handles:
            if self.failure is None:
                handle.ended(max(0.01, until - time.monotonic()))
            handle.kill()
        self._poll.close()
        self._launcher.close()


def _patience(ready: bool, seen: bool) -> float:
    """How long a rank that was not found stopped may say nothing; `seen`: somebody could look."""
    if not ready:
        return _START_SILENT_SECONDS
    return _SILENT_BUSY_SECONDS if seen else _SILENT_UNSEEN_SECONDS


def _as_error(told: dict[str, Any]) -> QuireError:
    """The error that a rank met, as the class it was."""
    kind = getattr(errors, told["kind"], None) if told["kind"] else None
    if not (isinstance(kind, type) and issubclass(kind, QuireError)):
        kind = EngineError
    error: QuireError = kind(told["message"])
    if told["field"] is not None and isinstance(error, ConfigError):
        error.field = told["field"]
    return error
