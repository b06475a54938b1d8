"""Work on long texts, kept off the event loop: in processes, some at a time, shared among keys, ended with its client.

The tokenizer holds Python's lock while it works, so a thread would hold up every stream.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.server.api_error import ApiError
from quire.server.long_texts.text_process import DONE

AT_ONCE = 2
_MOST_OF_KEY = 8
_MOST = 64


class Turns:
    """Who may work now: of the keys that have least at work the smallest job, and of each key so many at most."""

    def __init__(self) -> None:
        self._running: Counter[str | None] = Counter()
        self._waiting: list[tuple[str | None, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str | None, size: int) -> AsyncIterator[None]:
        mine = self._running[tenant] + sum(name == tenant for name, _, _ in self._waiting)
        if mine >= _MOST_OF_KEY or len(self._waiting) >= _MOST:
            raise ApiError(429, f"{mine} long texts of this key are being tokenized already: try again later",
                           code="too_many_long_texts", retry_after=2.0)
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (tenant, size, ticket)
        self._waiting.append(entry)
        self._next()
        try:
            await ticket
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self._leave(tenant)
            raise
        try:
            yield
        finally:
            self._leave(tenant)

    def _leave(self, tenant: str | None) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._next()

    def _next(self) -> None:
        while self._waiting and sum(self._running.values()) < AT_ONCE:
            best = min(self._waiting, key=lambda entry: (self._running[entry[0]], entry[1]))
            self._waiting.remove(best)
            if not best[2].cancelled():
                self._running[best[0]] += 1
                best[2].set_result(None)


class TextWork:
    """`start` starts a text process at the other end of a socket."""

    def __init__(self, start: Callable[[socket.socket], None]) -> None:
        self._start = start
        self._control: socket.socket | None = None
        self._turns = Turns()

    async def do(self, tenant: str | None, job: dict[str, Any]) -> bytes:
        """The result of a job; raises what is wrong with its text. Cancelling this ends the work."""
        data = await asyncio.to_thread(_packed, job)
        async with self._turns.turn(tenant, len(data)):
            for attempt in range(2):
                answer = await self._ask(data)
                if answer:
                    break
                # Its process has gone, or the one that forks them: a new one gets a try.
                self.close()
                if attempt:
                    raise ApiError(503, "the text could not be tokenized: it takes too much time or memory",
                                   code="text_too_large", retry_after=5.0)
        if answer[:1] == DONE:
            return answer[1:]
        message, field = json.loads(answer[1:])
        raise InvalidRequestError(message, field=field)

    async def _ask(self, data: bytes) -> bytes:
        """What the fork says; nothing where it ended before it was done."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        worker = -1
        try:
            try:
                self._hand_over(theirs)
            finally:
                theirs.close()
            hello = await loop.sock_recv(ours, 4)
            if len(hello) < 4:
                return b""
            with contextlib.suppress(OSError):
                worker = os.pidfd_open(int.from_bytes(hello, "little"))
            await loop.sock_sendall(ours, data)
            ours.shutdown(socket.SHUT_WR)
            pieces = []
            while piece := await loop.sock_recv(ours, 1 << 20):
                pieces.append(piece)
            return b"".join(pieces)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        finally:
            ours.close()
            if worker >= 0:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(worker, signal.SIGKILL)
                os.close(worker)

    def _hand_over(self, theirs: socket.socket) -> None:
        if self._control is None:
            self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                self._start(other)
        fds = array.array("i", [theirs.fileno()])
        self._control.sendmsg([b"job"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    def close(self) -> None:
        """The process ends when it learns of that."""
        if self._control is not None:
            self._control.close()
            self._control = None


def _packed(job: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(job)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the prompt is not valid Unicode text: {error.reason}", field="prompt") from error
