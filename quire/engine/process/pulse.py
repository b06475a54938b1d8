"""Signs of life of an engine's process: what it is doing, and for how long it could have been at it.

A step that takes long because others have the processors is not stuck: the time for which threads of this process were
ready to run and had no processor does not count.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from quire.engine.process import messages as m

HEARTBEAT_SECONDS = 0.5


class ProcessorWait:
    """How long this process waited for a processor, as the kernel counts it for each thread; 0 where it does not."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._waited = self._read()

    def since_last(self) -> float:
        """Seconds since the last call. Threads wait side by side, so the longest wait counts."""
        before, self._waited = self._waited, self._read()
        return max((waited - before.get(thread, 0) for thread, waited in self._waited.items()), default=0) / 1e9

    def _read(self) -> dict[str, int]:
        """Nanoseconds by thread."""
        found = {}
        try:
            for thread in os.listdir(self._tasks):
                try:
                    found[thread] = int((self._tasks / thread / "schedstat").read_text().split()[1])
                except (OSError, IndexError, ValueError):
                    continue  # it has ended
        except OSError:
            pass
        return found


class PhaseClock:
    """Seconds that a phase (or one step) has lasted, but for those in which the process waited for a processor."""

    def __init__(self, wait: ProcessorWait) -> None:
        self._wait = wait
        self._since = 0.0
        self._waited = 0.0

    def spent(self, since: float, now: float) -> float:
        if since != self._since:
            self._since, self._waited = since, 0.0
        self._waited += self._wait.since_last()
        return max(0.0, now - since - self._waited)


class Pulse(threading.Thread):
    """Sends them from a thread of its own, also while a step runs; ends the process when its parent has gone."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, parent: int) -> None:
        super().__init__(name="quire-pulse", daemon=True)
        self.state = ("starting", time.monotonic(), 0)
        """Phase, since when, and steps so far."""
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._parent = parent
        self._folder = os.path.dirname(endpoint.removeprefix("ipc://"))
        self._ended = threading.Event()

    def run(self) -> None:
        clock = PhaseClock(ProcessorWait())
        while not self._ended.wait(HEARTBEAT_SECONDS):
            if os.getppid() != self._parent:
                shutil.rmtree(self._folder, ignore_errors=True)  # the process that made it is gone
                os._exit(1)
            phase, since, steps = self.state
            try:
                beat = m.Heartbeat(phase, since, steps, clock.spent(since, time.monotonic()))
                self._socket.send(m.encode(beat), zmq.NOBLOCK)
            except zmq.Again:
                pass

    def end(self) -> None:
        self._ended.set()
        self.join()
        self._socket.close()
