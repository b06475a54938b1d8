"""Keeps an engine process running: starts it, watches that it lives and makes steps, restarts it when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import zmq

from quire import errors
from quire.engine.front.client import EngineClient, check_socket_path
from quire.engine.process import messages as m
from quire.errors import EngineDeadError, EngineError, QuireError
from quire.server_config import GuardConfig

log = logging.getLogger("quire.supervisor")

_LOOK_SECONDS = 0.25
_LONGEST_PAUSE = 30.0
_PROVEN_SECONDS = 60.0
"""An engine that has run for so long is not one that cannot start."""
_SILENT_START_SECONDS = 120.0
"""Loading libraries may hold up the heartbeat; longer than this it is a hang."""
_STOPPED_SECONDS = 1.0
"""Seconds that a process stopped by a signal gets to be continued, beyond the usual silence."""
_UNKILLABLE_SECONDS = 20.0


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


class EngineListener(Protocol):
    """Who hears what happens to the engine, on the event loop."""

    def ready(self, ready: m.Ready) -> None:
        """An engine takes requests from now on: the first, or one after a restart."""

    def take(self, message: m.FromEngine) -> None:
        """It has said something about requests."""

    def paused(self) -> None:
        """All messages that were there have been taken."""

    def died(self, error: EngineDeadError) -> None:
        """An engine that was ready is gone; this is for everyone who waits for it."""


class Supervisor:
    def __init__(self, options: Mapping[str, m.Plain], guard: GuardConfig, listener: EngineListener) -> None:
        self._options, self._guard, self._listener = options, guard, listener
        self._context: zmq.Context[Any] = zmq.Context()
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))  # for this user only
        self._client: EngineClient | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[m.Ready] | None = None
        self._failure: QuireError | None = None
        self._last_words: str | None = None
        self._silence = 0.0
        self._looked_at = 0.0
        self._ready_at = 0.0
        self._streak = 0
        """Deaths in a row since an engine proved that it can serve."""
        self._next_try = 0.0
        self.gave_up = asyncio.Event()
        """It was restarted `max_restarts` times in a row in vain, and is not restarted again."""
        self.state = State.STARTING
        self.restarts = 0
        self.proved = False
        """This engine has served a request."""

    @property
    def pid(self) -> int | None:
        return None if self._client is None else self._client.pid

    @property
    def steps(self) -> int:
        return 0 if self._client is None else self._client.heartbeat.steps

    # ---- a life

    async def start(self) -> m.Ready:
        """The first engine; raises what kept it from starting."""
        check_socket_path(self._folder)
        self._watchdog = asyncio.create_task(self._watch(), name="quire-watchdog")
        try:
            ready = await self._launch()
        except BaseException:
            await self.close()
            raise
        return ready

    async def _launch(self) -> m.Ready:
        self._ready = asyncio.get_running_loop().create_future()
        self._last_words, self._silence, self.proved = None, 0.0, False
        client = self._client = EngineClient(
            self._context, self._folder, str(self.restarts), on_message=self._take, on_pause=self._listener.paused,
            on_exit=lambda why: self._lost(why, client))
        client.spawn(self._options)
        return await self._ready

    def send(self, message: m.ToEngine) -> None:
        """To an engine that is not there, nothing is sent: `check` first where that matters."""
        if self._client is not None and self.state is State.READY:
            self._client.send(message)

    def check(self) -> None:
        """Raises EngineDeadError unless the engine is ready and was heard of lately."""
        if self.state is State.READY:
            if self._silence > self._guard.heartbeat_timeout / 2:
                raise EngineDeadError(f"the engine has given no sign of life for {self._silence:.1f} seconds")
            heartbeat = None if self._client is None else self._client.heartbeat
            if heartbeat is not None and heartbeat.phase == "stepping" \
                    and heartbeat.spent > self._guard.step_timeout / 2:
                raise EngineDeadError("the engine makes no progress: its step has been running for "
                                      f"{heartbeat.spent:.0f} seconds")
        elif self.state is State.FAILED:
            raise EngineDeadError(f"the engine has failed for good: {self._failure}")
        elif self.state is State.CLOSED:
            raise EngineDeadError("the engine was shut down")
        else:
            wait = max(1.0, self._next_try - time.monotonic() + 1.0)
            raise EngineDeadError(f"the engine is {self.state.value}: try again in a few seconds", retry_after=wait)

    async def close(self, patience: float = 5.0) -> None:
        """Stop the process, kindly for `patience` seconds. Idempotent."""
        was_ready, self.state = self.state is State.READY, State.CLOSED
        for task in (self._watchdog, self._restarting):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        client, self._client = self._client, None
        if client is not None and not client.exited.is_set():
            if was_ready:
                client.send(m.Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.exited.wait(), patience)
            client.abandon()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.exited.wait(), _UNKILLABLE_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._context.destroy(linger=0)

    # ---- what the engine says

    def _take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Ready):
            self.state, self._ready_at = State.READY, time.monotonic()
            if self._client is not None:
                self._client.heartbeat = m.Heartbeat("idle", self._ready_at, 0)  # the next one may never come
            self._listener.ready(message)
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, m.Failed):
            self._failure, self._last_words = _as_error(message), message.message
        else:
            self._listener.take(message)

    def _lost(self, why: str, client: EngineClient) -> None:
        """The process has ended or was given up: wake everything that waits for it."""
        if client is not self._client or self.state is State.CLOSED:
            return
        said = self._last_words or why
        if self._ready is not None and not self._ready.done():
            failure = self._failure if self._last_words is not None else None
            self._ready.set_exception(failure or EngineError(f"the engine did not start: {said}"))
        elif self.state is State.READY:
            log.error("the engine died: %s", said)
            self.state = State.RESTARTING
            proven = self.proved or time.monotonic() - self._ready_at > _PROVEN_SECONDS
            self._streak = 1 if proven else self._streak + 1
            self._listener.died(EngineDeadError(f"the engine died while this request was in flight: {said}",
                                                retry_after=1.0))
            self._restarting = asyncio.create_task(self._restart(client), name="quire-restart")

    async def _restart(self, old: EngineClient) -> None:
        """Try until one starts, with growing pauses; a bounded number of times in a row, or (`keep_restarting`) for
        ever."""
        # Its memory is wanted for the next one. What SIGKILL does not end within seconds hangs in the kernel.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(old.exited.wait(), _UNKILLABLE_SECONDS)
        while self._streak <= self._guard.max_restarts or self._guard.keep_restarting:
            pause = 0.0 if self._streak == 1 else min(_LONGEST_PAUSE, 0.5 * 2 ** min(self._streak - 2, 16))
            self._next_try = time.monotonic() + pause
            await asyncio.sleep(pause)
            self.restarts += 1
            try:
                await self._launch()
                log.warning("the engine was restarted (%d so far)", self.restarts)
                return
            except QuireError as error:
                self._streak += 1
                self._failure = error
                log.error("restarting the engine failed: %s", error)
        self.state = State.FAILED
        self._failure = self._failure or EngineError("it died too often")
        log.critical("the engine is given up: %s", self._failure)
        self.gave_up.set()

    # ---- whether it lives

    async def _watch(self) -> None:
        """Liveness is steps: silence, and a step that does not end, are death; being idle or slow to start is not."""
        self._looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            client = self._client
            if client is None or client.gone:
                self._looked_at = time.monotonic()
                continue
            complaint = self._complaint(client)
            if complaint is not None:
                log.error("killing the engine: %s", complaint)
                client.abandon()
                self._lost(complaint, client)

    def _complaint(self, client: EngineClient) -> str | None:
        now = time.monotonic()
        # If this process itself was held up, messages may lie unread: that time does not count against the engine.
        elapsed, self._looked_at = min(now - self._looked_at, 2 * _LOOK_SECONDS), now
        self._silence = 0.0 if now - client.last_heard < 2 * _LOOK_SECONDS + 0.5 else self._silence + elapsed
        # A heartbeat from the start may come in after the word that it is over.
        starting = client.heartbeat.phase == "starting" and self.state is not State.READY
        limit = max(_SILENT_START_SECONDS, self._guard.heartbeat_timeout) if starting else self._guard.heartbeat_timeout
        if self._silence > _STOPPED_SECONDS and client.stopped:
            return "its process was stopped"
        if self._silence > limit:
            return f"no sign of life for {self._silence:.1f} seconds"
        spent = now - client.heartbeat.since
        if starting and spent > self._guard.start_timeout:
            return f"it was not ready after {spent:.0f} seconds (start_timeout)"
        # By its own word: while nothing is heard of it, it may have made many steps.
        if client.heartbeat.phase == "stepping" and client.heartbeat.spent > self._guard.step_timeout:
            return f"a step has been running for {client.heartbeat.spent:.0f} seconds (step_timeout)"
        return None


def _as_error(failed: m.Failed) -> QuireError:
    """The error that ended the engine, as the class it was."""
    kind = getattr(errors, failed.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, QuireError)):
        kind = EngineError
    error: QuireError = kind(failed.message)
    if failed.field is not None and hasattr(error, "field"):
        error.field = failed.field
    return error
