"""HTTP to one server: connections that are kept, answers read as they come, and bounds on all that it may send."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from quire.errors import ConfigError, QuireError

_MAX_HEAD_BYTES = 64 * 1024
_MAX_UNPARSED = 256 * 1024
"""Bytes that may come without completing a piece of the body."""
_HEAD_SECONDS = 10.0
"""From the first byte of an answer to the end of its headers. How long the first byte may take is the caller's."""
_BUFFERED = 256 * 1024
"""More than this is not read ahead of a client that reads slowly."""
_IDLE_SECONDS = 4.0
"""Servers close a connection on which nothing happens after 5 seconds or more: one of less is safe to use again."""
_MAX_IDLE = 64
_ENDS_PATH = re.compile(r"[\x00-\x20\x7f]")
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(QuireError):
    """A server cannot be reached, broke off, or answers nonsense. `reached`: it may have begun with the request."""

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


@dataclass(slots=True)
class Answer:
    """Status and headers of an answer; its body is read as it comes. To be closed, read to the end or not."""

    status: int
    headers: list[tuple[bytes, bytes]]
    _connection: _Connection
    _owner: Upstream

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def read(self) -> bytes:
        """The next bytes, all that are there; none at the end. Raises UpstreamError where it breaks off."""
        return await self._connection.read()

    async def whole(self, most: int) -> bytes:
        pieces, size = [], 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise UpstreamError(f"the answer is larger than {most} bytes", reached=True)
        return b"".join(pieces)

    def close(self) -> None:
        self._owner.done(self._connection)


@dataclass(slots=True)
class _Message:
    """The answer that a connection is reading."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    begun: bool = False
    headed: bool = False
    complete: bool = False
    until_close: bool = False
    keeps: bool = False
    """The server keeps the connection open after it."""


class _Connection(asyncio.Protocol):
    """One connection; one request after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._message: _Message | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unparsed = 0
        self._paused = False
        self.error: UpstreamError | None = None
        self.idle_since = 0.0

    @property
    def reusable(self) -> bool:
        message = self._message
        return (self.error is None and message is not None and message.complete and message.keeps
                and self._transport is not None and not self._transport.is_closing())

    # ---- what the owner does

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._message = _Message()
        self._unparsed = 0
        self._transport.write(data)

    async def head(self) -> _Message:
        """Waits for the headers of the answer."""
        message = self._current()
        while not message.headed:
            self._raise_if_broken()
            await self._wait()
        return message

    async def read(self) -> bytes:
        message = self._current()
        while not message.pieces:
            if message.complete:
                return b""
            self._raise_if_broken()
            await self._wait()
        found = message.pieces[0] if len(message.pieces) == 1 else b"".join(message.pieces)
        message.pieces.clear()
        message.size = 0
        if self._paused and self._transport is not None and self.error is None:
            self._paused = False
            self._transport.resume_reading()
        return found

    def fail(self, why: str) -> None:
        """Fail its reader with `why`."""
        if self.error is None:
            begun = self._message is not None
            self.error = UpstreamError(why, reached=begun)
        self.abort()
        self._wake()

    def abort(self) -> None:
        self._headed()
        if self._transport is not None:
            self._transport.abort()

    def _current(self) -> _Message:
        assert self._message is not None
        return self._message

    def _raise_if_broken(self) -> None:
        if self.error is not None:
            raise UpstreamError(str(self.error), reached=self.error.reached)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _headed(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        message = self._message
        if self.error is not None:
            return
        if message is None or message.complete:
            self.fail("it sent bytes that belong to no request")
            return
        if not message.begun:
            message.begun = True
            self._deadline = self._loop.call_later(_HEAD_SECONDS, self.fail, "its headers do not end")
        self._unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(f"it does not answer in HTTP ({type(error).__name__})")
            return
        if self._unparsed > (_MAX_UNPARSED if message.headed else _MAX_HEAD_BYTES):
            self.fail("its headers are too large")
        elif message.size > _BUFFERED and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headed()
        message = self._message
        if message is not None and message.headed and message.until_close and exc is None:
            message.complete = True
        elif self.error is None and (message is None or not message.complete):
            self.error = UpstreamError("it closed the connection in the middle of an answer" if message is not None
                                       and message.headed else "it closed the connection", reached=message is not None)
        self._wake()

    # ---- httptools

    def on_message_begin(self) -> None:
        if self._message is None or self._message.headed:
            raise ValueError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._current().headed:  # what comes after the body is none of ours
            self._current().headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        message = self._current()
        message.status = self._parser.get_status_code()
        if not 200 <= message.status <= 599:
            raise ValueError(f"the status {message.status} is outside 200 to 599")
        names = {name for name, _ in message.headers}
        message.until_close = not (names & {b"content-length", b"transfer-encoding"} or message.status in (204, 304))
        message.keeps = not message.until_close and self._parser.should_keep_alive()
        message.headed = True
        self._unparsed = 0
        self._headed()
        self._wake()

    def on_body(self, body: bytes) -> None:
        message = self._current()
        message.pieces.append(body)
        message.size += len(body)
        self._unparsed = 0
        self._wake()

    def on_message_complete(self) -> None:
        self._current().complete = True
        self._wake()


class Upstream:
    """All connections to one server."""

    def __init__(self, url: str, connect_timeout: float = 5.0) -> None:
        self.url, self.connect_timeout = url, connect_timeout
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            self._host = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        except ValueError as error:
            raise _no_address(url) from error
        if (parts.scheme not in ("http", "https") or not host or parts.query or parts.username
                or _ENDS_PATH.search(parts.netloc + parts.path)):
            raise _no_address(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = (host, port or (443 if self._tls else 80))
        self._folder = parts.path.rstrip("/").encode()
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()

    async def request(self, method: str, path: str, headers: Headers = (), body: bytes = b"") -> Answer:
        """The answer as soon as its headers are there. `path` with its query, `headers` without Host and length."""
        connection = await self._connection()
        self._busy.add(connection)
        try:
            connection.send(self._head(method, path, headers, len(body)) + body)
            message = await connection.head()
        except BaseException:
            connection.abort()
            self._busy.discard(connection)
            raise
        return Answer(message.status, message.headers, connection, self)

    async def ask(self, method: str, path: str, headers: Headers = (), body: bytes = b"", *, timeout: float,
                  most: int = 1 << 20) -> tuple[int, bytes]:
        """Status and body of a short question. Raises UpstreamError, also where the answer does not come in time."""
        try:
            async with asyncio.timeout(timeout):
                answer = await self.request(method, path, headers, body)
                with contextlib.closing(answer):
                    return answer.status, await answer.whole(most)
        except TimeoutError:
            raise UpstreamError(f"it did not answer within {timeout:g} seconds", reached=True) from None

    def done(self, connection: _Connection) -> None:
        """Nobody reads from it any more: it is kept for the next request, or closed where its answer has not ended."""
        if connection not in self._busy:
            return
        self._busy.discard(connection)
        if connection.reusable and len(self._idle) < _MAX_IDLE:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()

    def cut(self, why: str) -> None:
        """Close every connection; readers fail with `why`."""
        for connection in [*self._busy, *self._idle]:
            connection.fail(why)
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()  # the one used last: the others can age
            if connection.reusable and time.monotonic() - connection.idle_since < _IDLE_SECONDS:
                return connection
            connection.abort()
        host, port = self._address
        try:
            async with asyncio.timeout(self.connect_timeout):
                _, made = await asyncio.get_running_loop().create_connection(_Connection, host, port, ssl=self._tls)
        except TimeoutError:
            raise UpstreamError(f"it took no connection within {self.connect_timeout:g} seconds",
                                reached=False) from None
        except OSError as error:
            raise UpstreamError(f"it cannot be reached ({error.strerror or error})", reached=False) from None
        return made

    def _head(self, method: str, path: str, headers: Headers, length: int) -> bytes:
        if not path.isascii() or _ENDS_PATH.search(path):
            raise ValueError("a path must be percent-encoded")
        lines = [b"%s %s%s HTTP/1.1" % (method.encode(), self._folder, path.encode()), b"host: " + self._host,
                 b"content-length: %d" % length, *(name + b": " + value for name, value in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _no_address(url: str) -> ConfigError:
    return ConfigError(f"{url!r:.200} is no address of a server: write it as http://host:8000", field="replicas")
