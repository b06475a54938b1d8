"""A thread that sends KV to one other engine, one range after the other, so that no step waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from quire.errors import QuireError
from quire.peers.mover import Data, KVSends


@dataclass(slots=True)
class Range:
    """Tokens start … end-1 of a transfer, and the blocks that hold them."""

    ticket: Data
    tables: list[list[int]]
    start: int
    end: int
    done: Callable[[int, str | None], None]
    """Called on the lane's thread, once: bytes, and why it failed. The blocks are not read after that."""
    wanted: Callable[[], bool] = lambda: True
    """Asked on the lane's thread before it begins."""


class Lane(Protocol):
    """Sends ranges to one other engine, in their order."""

    def put(self, job: Range) -> None: ...

    def stop(self) -> None:
        """Fail what is being sent and all that waits. Returns at once; every range still reports."""
        ...

    def join(self, seconds: float) -> None: ...


class SendLane:
    """A lane with a thread of its own."""

    def __init__(self, connect: Callable[[], KVSends], name: str) -> None:
        self._connect = connect
        self._sender: KVSends | None = None
        self._queue: SimpleQueue[Range | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Range) -> None:
        self._queue.put(job)

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            sender = self._sender
        if sender is not None:
            sender.abort()
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job.done(*self._carry_out(job))
        with self._lock:
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _carry_out(self, job: Range) -> tuple[int, str | None]:
        if self._stopped.is_set():
            return 0, "the link is closed"
        if not job.wanted():
            return 0, "nobody waits for it any more"
        try:
            return self._open().send(job.ticket, job.tables, job.start, job.end) or 0, None
        except Exception as error:
            return 0, str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"

    def _open(self) -> KVSends:
        if self._sender is None:
            made = self._connect()
            with self._lock:
                self._sender = made
            if self._stopped.is_set():
                made.abort()
        return self._sender
