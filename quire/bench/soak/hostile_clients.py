"""Clients that mean harm, for `quire bench soak --hostile`: each does one bad thing and goes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from quire.bench.serving.http_client import ask

_RULES = "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1} a{i + 1} | a{i + 1}" for i in range(40)), 'a40 ::= "a" | "b"'])
_RAW = (
    "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
    "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\n\r\n", "GET /\x1b[2J HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
)
_LONGEST = 15.0
"""Seconds that one of them spends on one thing."""


class HostileClients:
    """All of them use one key, if they use any."""

    def __init__(self, address: str, key: str, seed: int) -> None:
        self._address, self._key = address, key
        self._dice = random.Random(seed)
        self.done: dict[str, int] = {}
        """How often each thing was done."""

    async def run(self, until: Callable[[], bool]) -> None:
        """All kinds at once, again and again."""
        kinds: list[Callable[[], Awaitable[object]]] = [
            self.grammar_bomb, self.grammar_bomb, self.abandoned_schema, self.endless_header,
            self.endless_requests, self.huge_text, self.abandoned_text, self.abandoned_stream, self.idle_watchers,
            self.broken_http, self.too_much]

        async def repeat(kind: Callable[[], Awaitable[object]]) -> None:
            while not until():
                # Whatever the server does to them is right, if it is over in time.
                with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, IndexError, ValueError):
                    async with asyncio.timeout(_LONGEST):
                        await kind()
                name = kind.__name__
                self.done[name] = self.done.get(name, 0) + 1
                await asyncio.sleep(0.05)

        await asyncio.gather(*map(repeat, kinds))

    async def grammar_bomb(self) -> None:
        size = self._dice.randrange(300, 900)
        shape: dict[str, Any] = self._dice.choice([{"regex": f"(.?){{{size}}}"}, {"regex": f"((a|b)?.?){{{size}}}"},
                                                   {"grammar": _RULES + f' | "{size}"'}])
        await self._post("/v1/completions", {"prompt": "x", "max_tokens": 20, "structured_outputs": shape})

    async def abandoned_schema(self) -> None:
        schema = {"type": "object", "title": str(self._dice.random()),
                  "properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(800)}}
        await self._abandon("/v1/completions", {"prompt": "x", "structured_outputs": {"json": schema}}, 1.0)

    async def huge_text(self) -> None:
        await self._post("/tokenize", {"prompt": self._text(3_000_000)})

    async def abandoned_text(self) -> None:
        await asyncio.gather(*[self._abandon("/tokenize", {"prompt": self._text(1_000_000)}, 1.0) for _ in range(4)])

    async def abandoned_stream(self) -> None:
        body = {"prompt": f"x {self._dice.random()}", "max_tokens": 500, "stream": True, "ignore_eos": True}
        await ask(self._address, "/v1/completions", body, key=self._key, hang_up_after=200)

    async def idle_watchers(self) -> None:
        await asyncio.gather(*[self._abandon("/v1/engine/events", None, 3.0) for _ in range(16)],
                             *[self._abandon("/v1/engine/scenarios", {"scenario": "samples", "speed": 0.1}, 3.0)
                               for _ in range(4)])

    async def too_much(self) -> None:
        """Bodies that take long to read, and parameters that are none."""
        body: Any = self._dice.choice([{"prompt": [1] * 700_000},
                                       {"messages": [{"role": "user", "content": ""}] * 50_000},
                                       {"prompt": "x", "logit_bias": {str(i): 1 for i in range(100_000)}},
                                       {"prompt": "x", "chat_template_kwargs": {"self": 1}}])
        await self._post("/v1/chat/completions" if "messages" in body else "/v1/completions", body)

    async def endless_header(self) -> None:
        reader, writer = await self._connect()
        try:
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
            for _ in range(500):
                writer.write(b"a" * 65536)
                await writer.drain()
            await reader.read(100)
        finally:
            writer.close()

    async def endless_requests(self) -> None:
        """One after another without reading an answer."""
        reader, writer = await self._connect()
        try:
            for _ in range(100):
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1500)
                await writer.drain()
            await reader.read(100)
        finally:
            writer.close()

    async def broken_http(self) -> None:
        reader, writer = await self._connect()
        try:
            writer.write(self._dice.choice(_RAW).encode())
            await writer.drain()
            await reader.read(100)
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self._address)
        return await asyncio.open_connection(parts.hostname, parts.port)

    async def _post(self, path: str, body: Any) -> None:
        await ask(self._address, path, body, key=self._key)

    async def _abandon(self, path: str, body: Any, seconds: float) -> None:
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            await ask(self._address, path, body, key=self._key, timeout=seconds)

    def _text(self, characters: int) -> str:
        word = f"{self._dice.random()} "
        return word * (characters // len(word))
