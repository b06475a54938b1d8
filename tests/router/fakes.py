"""A router in a thread, and servers that do whatever a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from quire.router.app import build_router, start_router
from quire.router.replica import Role
from quire.server.run import serve
from quire.server_config import RouterConfig, ServerConfig
from tests.server.scripted import served_in_thread

Say = Callable[[str, dict[str, str], bytes, asyncio.StreamWriter], Awaitable[bool]]
"""Gets path, headers, body and where to write; true if the connection can be used again."""
CARD = json.dumps({"data": [{"id": "fake"}]}).encode()


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return (f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n").encode() + body


def stream_head() -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class FakeServer:
    """Well, with a model, until a test changes `say` or `health`."""

    def __init__(self, say: Say | None = None) -> None:
        self.say = say or self.hello
        self.health = whole(b'{"status":"ok"}')
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        """All but questions about health and models."""
        self.kv_events: bytes | None = None
        """What it says to who asks for its KV events, before it hangs up."""
        self.asked_events = 0
        self.connections = 0
        self.address = ""

    async def hello(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        if b'"stream":true' in body.replace(b" ", b""):
            writer.write(stream_head() + chunk(b'data: {"text":"a"}\n\n') + chunk(b"data: [DONE]\n\n") + chunk(b""))
        else:
            writer.write(whole(b'{"text":"a"}'))
        return True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._one(reader, writer):
                await writer.drain()
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        path = head[0].split()[1]
        if path == "/health":
            writer.write(self.health)
            return True
        if path == "/v1/models":
            writer.write(whole(CARD))
            return True
        if path.startswith("/v1/kv/"):
            self.asked_events += 1
            if self.kv_events is None:
                writer.write(whole(b"{}", "404 Not Found"))
                return True
            writer.write(stream_head() + chunk(self.kv_events))
            return False
        self.asked.append((path, headers, body))
        return await self.say(path, headers, body, writer)


class Loop:
    """An event loop in a thread, for servers that a test starts."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        self.run(self._cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    async def _cancel(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def fakes(*servers: FakeServer) -> Iterator[list[str]]:
    """Their addresses."""
    loop = Loop()
    listening = []
    try:
        for each in servers:
            made = loop.run(asyncio.start_server(each.handle, "127.0.0.1", 0))
            each.address = f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
            listening.append(made)
        yield [each.address for each in servers]
    finally:
        for made in listening:
            loop.loop.call_soon_threadsafe(made.close)
        loop.close()


@contextlib.contextmanager
def routed(servers: list[str] | list[tuple[str, Role]], *, server: dict[str, Any] | None = None,
           **options: Any) -> Iterator[tuple[str, Any]]:
    """(address, service) of a router in a thread."""
    config = ServerConfig.create(**{"port": 0, "drain_timeout": 5.0, **(server or {})})
    router = RouterConfig.create(**{"policy": "round-robin", "health_interval": 0.1, **options})
    listed = [each if isinstance(each, tuple) else (each, Role.BOTH) for each in servers]

    async def start() -> Any:
        return await start_router(router, listed)

    with served_in_thread(partial(serve, config, start, build=build_router)) as (address, app):
        yield address, app.service
