"""A small HTTP client for load: one request per connection, answers read as they come, free to hang up at any time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Reply:
    """What came back; `status` 0 where the connection ended before an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hung_up: bool = False
    times: list[float] = field(default_factory=list)
    """When each piece of the body came."""

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The chunks of a stream, without its [DONE]."""
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def complete(self) -> bool:
        """A stream that came to its end."""
        return self.body.rstrip().endswith(b"data: [DONE]")


async def ask(address: str, path: str, body: Any = None, *, key: str | None = None, timeout: float = 120.0,
              hang_up_after: int | None = None, on_piece: Callable[[bytes], None] | None = None) -> Reply:
    """POST `body` (bytes as they are, anything else as JSON), or GET where there is none.

    `hang_up_after`: close the connection when so many bytes of the answer have come.
    """
    parts = urlsplit(address)
    reply = Reply()
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(_request(parts.netloc, path, body, key))
            await writer.drain()
            if hang_up_after == 0:
                reply.hung_up = True
                return reply
            await _read(reader, reply, hang_up_after, on_piece)
        finally:
            writer.close()
    return reply


def _request(host: str, path: str, body: Any, key: str | None) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {host}", "connection: close",
             f"content-length: {len(data)}", "content-type: application/json"]
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


async def _read(reader: asyncio.StreamReader, reply: Reply, hang_up_after: int | None,
                on_piece: Callable[[bytes], None] | None) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.status = int(head[0].split()[1])
    for line in head[1:]:
        name, _, value = line.partition(":")
        reply.headers[name.strip().lower()] = value.strip()
    chunked = reply.headers.get("transfer-encoding") == "chunked"
    pieces: list[bytes] = []
    size = 0
    while True:
        if chunked:
            length = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = (await reader.readexactly(length + 2))[:-2]
            if not length:
                break
        else:
            piece = await reader.read(1 << 16)
            if not piece:
                break
        pieces.append(piece)
        reply.times.append(time.perf_counter())
        if on_piece is not None:
            on_piece(piece)
        size += len(piece)
        if hang_up_after is not None and size >= hang_up_after:
            reply.hung_up = True
            break
    reply.body = b"".join(pieces)
