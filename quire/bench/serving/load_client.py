"""Sends the requests of a load test to a server and notes when each piece of each answer came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.bench.serving.load_data import LoadRequest
from quire.client.endpoint import Endpoint, error_text
from quire.client.events import EventParser

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(slots=True)
class Sent:
    """What became of one request; times in seconds of one clock."""

    request: LoadRequest
    start: float = 0.0
    end: float = 0.0
    pieces: list[float] = field(default_factory=list)
    """When each piece of text came."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.start

    @property
    def latency(self) -> float:
        """To the last piece of text."""
        return self.pieces[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; none where there was only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [later - sooner for sooner, later in zip(self.pieces, self.pieces[1:])]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the load goes, and what every request says beside its prompt."""

    endpoint: Endpoint
    backend: str
    fields: dict[str, Any] = field(default_factory=dict)
    path: str | None = None

    @property
    def url(self) -> str:
        return self.endpoint.url + (self.path or PATHS[self.backend])

    def body(self, request: LoadRequest) -> dict[str, Any]:
        asked = ({"messages": [{"role": "user", "content": request.prompt}]} if self.backend == "openai-chat"
                 else {"prompt": request.prompt})
        return {"model": self.endpoint.model_name(), **asked, "max_tokens": request.max_tokens, "stream": True,
                "stream_options": {"include_usage": True}, **self.fields}


async def send_all(target: Target, requests: Sequence[LoadRequest], times: Sequence[float],
                   max_concurrency: int | None, done: Callable[[Sent], None]) -> tuple[list[Sent], float]:
    """All requests, each at its time or as soon after it as concurrency allows; and how long it took."""
    import aiohttp

    allowed = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    timeout = aiohttp.ClientTimeout(total=target.endpoint.timeout * 36)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout,
                                     headers=target.endpoint.headers, read_bufsize=1 << 18) as session:
        began = time.perf_counter()

        async def one(request: LoadRequest, at: float) -> Sent:
            await asyncio.sleep(began + at - time.perf_counter())
            async with allowed:
                sent = await send(session, target, request)
            done(sent)
            return sent

        results = await asyncio.gather(*(one(*pair) for pair in zip(requests, times, strict=True)))
        return list(results), time.perf_counter() - began


async def send(session: Any, target: Target, request: LoadRequest) -> Sent:
    """One request; whatever goes wrong with it is part of the record."""
    import aiohttp

    sent = Sent(request, start=time.perf_counter())
    try:
        async with session.post(target.url, json=target.body(request)) as answer:
            if answer.status != 200:
                sent.error = error_text(answer.status, (await answer.read()).decode(errors="replace"))
            else:
                await _read(answer, sent)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        sent.error = f"{type(error).__name__}: {error}"
    sent.end = time.perf_counter()
    if sent.error is None and not sent.pieces:
        sent.error = "the answer had no text"
    return sent


async def _read(answer: Any, sent: Sent) -> None:
    parser, ended = EventParser(), False
    async for piece in answer.content.iter_any():
        now = time.perf_counter()
        for data in parser.feed(piece):
            if data == b"[DONE]":
                ended = True
            else:
                _note(json.loads(data), sent, now)
    if not ended and sent.error is None:
        sent.error = "the connection closed in the middle of the answer"
    if not sent.output_tokens:
        sent.output_tokens = len(sent.pieces)  # a server that tells no usage: one piece is one token there


def _note(chunk: dict[str, Any], sent: Sent, now: float) -> None:
    if chunk.get("error"):
        sent.error = error_text(500, json.dumps(chunk))
        return
    usage = chunk.get("usage")
    if usage:
        sent.prompt_tokens, sent.output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        sent.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            sent.pieces.append(now)
            break
