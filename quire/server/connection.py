"""uvicorn's HTTP protocol with bounds that it lacks: number of connections, size of headers, time to send them."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.config import ServerConfig

_MAX_HEADER_BYTES = 64 * 1024
_BUSY = (b'{"error":{"message":"too many connections are open: come back later","type":"service_unavailable_error",'
         b'"param":null,"code":"too_many_connections"}}')
_LONG = (b'{"error":{"message":"the headers are too large","type":"invalid_request_error","param":null,'
         b'"code":"headers_too_large"}}')
_UNREADABLE = (b'{"error":{"message":"this is not valid HTTP","type":"invalid_request_error","param":null,'
               b'"code":"invalid_http"}}')


class _UntilClosed(int):
    """What uvicorn believes to be left of a body whose length nobody knows: enough for any piece, and 0 at the end."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UntilClosed:  # type: ignore[override]
        return self


def bounded_protocol(config: ServerConfig) -> type[HttpToolsProtocol]:
    """The protocol class for a server with these limits."""

    class BoundedProtocol(HttpToolsProtocol):
        _header_bytes = 0
        _deadline: Any = None

        def connection_made(self, transport: Any) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > config.max_connections:
                self._refuse(b"503 Service Unavailable", _BUSY, b"retry-after: 1\r\n")
                return
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0
            self._await_headers()

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._count(len(name) + len(value))

        def on_headers_complete(self) -> None:
            self._headers_came()
            if not self.transport.is_closing():
                super().on_headers_complete()
                if self.cycle is not None and self.parser.get_http_version() == "1.0":
                    # It knows no chunks: a stream ends with its connection, which is closed in any case.
                    self.cycle.chunked_encoding = False
                    self.cycle.expected_content_length = _UntilClosed()

        def on_body(self, body: bytes) -> None:
            if self.cycle is not None:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if self.cycle is not None:
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(b"400 Bad Request", _UNREADABLE)

        def _await_headers(self) -> None:
            """A client that opens a connection and says nothing does not keep it."""
            self._headers_came()
            self._deadline = self.loop.call_later(config.read_timeout, self.transport.close)

        def _headers_came(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _count(self, size: int) -> None:
            self._header_bytes += size
            if self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large", _LONG)

        def _refuse(self, status: bytes, body: bytes, extra: bytes = b"") -> None:
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\nconnection: close\r\n" + extra
                + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
            self.transport.close()

    return BoundedProtocol
