"""One engine process as seen from outside: its sockets, its messages, its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire.child import child_environment, explain_exit, module_command
from quire.engine.process import messages as m
from quire.errors import EngineError

log = logging.getLogger("quire.client")

_SLICE_SECONDS = 0.005
"""Messages are taken in for so long at a time; then everybody else on the event loop has a turn."""
_LAST_WORDS_SECONDS = 0.05


class EngineClient:
    """A process from its start to its end. All callbacks come on the event loop that made it.

    `on_message` gets every message but heartbeats; `on_pause` is called when those that were there are taken in,
    `on_exit` once, after the last message, with what ended the process.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        folder: Path,
        name: str,
        *,
        on_message: Callable[[m.FromEngine], None],
        on_pause: Callable[[], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_pause, self._on_exit = on_message, on_pause, on_exit
        self._endpoints = [f"ipc://{folder / name}.{side}" for side in ("in", "out")]
        self._out, self._in = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self._out, self._in):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        # A socket that connects has somewhere to queue messages, also before the other side is there.
        self._out.connect(self._endpoints[0])
        self._in.bind(self._endpoints[1])
        self._fd = int(self._in.getsockopt(zmq.FD))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._said: str | None = None
        """What it did wrong, where that ended it."""
        self.heartbeat = m.Heartbeat("starting", time.monotonic(), 0)
        self.last_heard = time.monotonic()
        self.exited = asyncio.Event()

    @property
    def gone(self) -> bool:
        """Nothing more will be heard of it."""
        return self._closed

    @property
    def stopped(self) -> bool:
        """The process was stopped by SIGSTOP, which it cannot report itself."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def spawn(self, options: Mapping[str, m.Plain]) -> None:
        """Start the process and tell it what to build."""
        self._process = subprocess.Popen(
            module_command("quire.engine.process.main", *self._endpoints, str(os.getpid())),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints is no part of a command's output
            env=child_environment(),
            start_new_session=True,  # a Ctrl-C is for the front door alone
        )
        self.heartbeat = m.Heartbeat("starting", time.monotonic(), 0)
        self._loop.add_reader(self._fd, self._readable)
        threading.Thread(target=self._wait, args=(self._process,), name="quire-wait", daemon=True).start()
        self.send(m.Start(dict(options)))

    def send(self, message: m.ToEngine) -> None:
        """Queue a message; never waits. What is sent to a process that has gone is lost."""
        if not self._closed:
            with contextlib.suppress(zmq.Again):
                self._out.send(m.encode(message), zmq.NOBLOCK)

    def abandon(self) -> None:
        """Kill the process, whatever it does, and hear no more of it; `exited` is set when it has really gone."""
        self.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()  # reaches a stopped process too

    def close(self) -> None:
        """Let go of the sockets. Idempotent; the process must be told or killed before."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        for socket, endpoint in zip((self._out, self._in), self._endpoints, strict=True):
            socket.close(linger=0)
            with contextlib.suppress(OSError):
                os.unlink(endpoint.removeprefix("ipc://"))

    # ---- what comes in

    def _readable(self) -> None:
        """The socket's descriptor tells of changes only, so take all there is, in slices of time."""
        if self._closed:
            return
        until = time.monotonic() + _SLICE_SECONDS
        while True:
            try:
                data = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(data)
            if self._closed:
                return
            if time.monotonic() >= until:
                self._loop.call_soon(self._readable)
                break
        self._on_pause()

    def _take(self, data: bytes) -> None:
        self.last_heard = time.monotonic()
        try:
            message = m.decode_from_engine(data)
        except msgspec.DecodeError as error:
            self._said = f"it sent a message that cannot be decoded ({error})"
            self.abandon()
            return
        if isinstance(message, m.Heartbeat):
            self.heartbeat = message
            return
        try:
            self._on_message(message)
        except Exception:  # the next message must be read whatever this one did
            log.exception("a message from the engine could not be handled")

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop has closed before
            self._loop.call_soon_threadsafe(self._gone, code)

    def _gone(self, code: int) -> None:
        # Its last words may still be on their way through the socket.
        self._loop.call_later(_LAST_WORDS_SECONDS, self._finish, code)

    def _finish(self, code: int) -> None:
        while not self._closed:
            try:
                self._take(self._in.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        self._on_pause()
        self.close()
        self.exited.set()
        # Called also after `abandon`, whose caller knows already.
        self._on_exit(self._said or explain_exit(code))


def check_socket_path(folder: Path) -> None:
    """Addresses of Unix sockets are short: say so here, where it is clear what to do."""
    if len(os.fsencode(folder)) > 80:
        raise EngineError(f"{folder} is too long a name for the folder of a socket: set TMPDIR to a shorter one")
