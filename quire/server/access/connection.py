"""uvicorn's HTTP protocol with bounds that it lacks (connections, size of headers, time to send them) and refusals."""

from __future__ import annotations

import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server_config import ServerConfig

_MAX_HEADER_BYTES = 64 * 1024
_MAX_UNPARSED = 64 * 1024
"""Bytes that may come without completing anything: the headers, a piece of the body, or the message."""
_MAX_PIPELINED = 16
"""Requests that may wait on a connection for the answer to the one before. One read can hold thousands."""
_FREE_PIECES = 1024
_PIECE_BYTES = 64
"""A body may come in so many chunks, and in one more for so many bytes: each costs the event loop some microseconds,
and one read can hold 40,000 of a byte."""
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 4 << 20
"""A refused client is listened to for so long, and so much of it is dropped: with a connection that is reset at once
it would not see the answer."""
_BUSY = (b'{"error":{"message":"too many connections are open: come back later","type":"service_unavailable_error",'
         b'"param":null,"code":"too_many_connections"}}')
_LONG = (b'{"error":{"message":"the headers are too large","type":"invalid_request_error","param":null,'
         b'"code":"headers_too_large"}}')
_UNREADABLE = (b'{"error":{"message":"this is not valid HTTP","type":"invalid_request_error","param":null,'
               b'"code":"invalid_http"}}')
_HOST = (b'{"error":{"message":"a request needs exactly one Host header","type":"invalid_request_error","param":null,'
         b'"code":"invalid_host"}}')
_OTHER_HOST = (b'{"error":{"message":"the URL names another server than the Host header",'
               b'"type":"invalid_request_error","param":null,"code":"invalid_host"}}')
_ENCODING = (b'{"error":{"message":"the only Transfer-Encoding that this server reads is chunked, without a '
             b'Content-Length","type":"invalid_request_error","param":null,"code":"unsupported_transfer_encoding"}}')


class _UntilClosed(int):
    """What uvicorn believes to be left of a body of unknown length: enough for any piece, and 0 at the end."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UntilClosed:  # type: ignore[override]
        return self


class BoundedProtocol(HttpToolsProtocol):
    """One connection. uvicorn makes it, so the limits come with the class: see `bounded_protocol`."""

    limits: ServerConfig
    _header_bytes = 0
    _unparsed = 0
    _dropped = 0
    _pieces = 0
    _body_bytes = 0
    _refused = False
    _in_headers = True
    _deadline: Any = None

    def connection_made(self, transport: Any) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(b"503 Service Unavailable", _BUSY, b"retry-after: 1\r\n")
            return
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._dropped += len(data)
            if self._dropped > _LINGER_BYTES:
                self.transport.close()
        elif not self.transport.is_closing():
            # The parser tells of a header when it is complete, and keeps what there is of it until then.
            self._unparsed += len(data)
            super().data_received(data)
            if self._unparsed > _MAX_UNPARSED:
                self._refuse(b"431 Request Header Fields Too Large", _LONG)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self._refused or len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("what follows is not parsed")  # the parser stops here, and the connection is closed
        super().on_message_begin()
        self._header_bytes = self._pieces = self._body_bytes = 0
        self._in_headers = True
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # what comes after the body (a trailer) is none: it could bring a key or a Host
            super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._headers_came()
        self._unparsed, self._in_headers = 0, False
        refusal = None if self._refused else _unacceptable(
            self.parser.get_http_version(), self.url, self.headers)
        if refusal is not None:
            self._refuse(*refusal)
        if not self._refused and not self.transport.is_closing():
            super().on_headers_complete()
            if self.cycle is not None and self.parser.get_http_version() == "1.0":
                # It knows no chunks: a stream ends with its connection, which is closed in any case.
                self.cycle.chunked_encoding = False
                self.cycle.expected_content_length = _UntilClosed()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > _FREE_PIECES + self._body_bytes // _PIECE_BYTES:
            raise ValueError("what follows is not parsed")  # the parser stops here, and the connection is closed
        if self.cycle is not None and not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        if self.cycle is not None and not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", _UNREADABLE)

    def _await_headers(self) -> None:
        """A client that opens a connection and says nothing does not keep it."""
        self._headers_came()
        self._deadline = self.loop.call_later(self.limits.read_timeout, self.transport.close)

    def _headers_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large", _LONG)

    def _refuse(self, status: bytes, body: bytes, extra: bytes = b"") -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._headers_came()
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:  # bytes of another answer are on their way: this one would be taken for a part of it
            self.transport.close()
            return
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n" + extra
            + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        if extra:  # one connection too many is not kept open to be polite
            self.transport.close()
        else:
            self.transport.write_eof()
            self._deadline = self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def bounded_protocol(config: ServerConfig) -> type[HttpToolsProtocol]:
    """The protocol class for a server with these limits."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": config})


def _unacceptable(version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes] | None:
    """Status and body of the refusal of headers that two servers in a row might read differently; None if they are
    plain."""
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version != "1.0"):
        return b"400 Bad Request", _HOST
    named = re.match(rb"[a-z][a-z0-9+.-]*://([^/?#]*)", url, re.IGNORECASE)
    if named is not None and any(name == b"host" and value.lower() != named[1].lower() for name, value in headers):
        return b"400 Bad Request", _OTHER_HOST
    encodings = [value for name, value in headers if name == b"transfer-encoding"]
    if encodings and (len(encodings) > 1 or encodings[0].strip().lower() != b"chunked" or version == "1.0"
                      or any(name == b"content-length" for name, _ in headers)):
        return b"501 Not Implemented", _ENCODING
    return None
