"""What passing through a router costs: the delay of each token, and the throughput of many streams, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from quire.bench.routing.fleet import Running, new_secret, replicas, router
from quire.bench.serving.http_client import ask
from quire.errors import QuireError

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def delay(streams: int, rate: float, tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds by which a token comes later through a router: a server that writes the time into every token is
    read directly and through the router, in turns, at `rate` tokens per second over all streams."""
    found, cpu = asyncio.run(_delay(streams, rate, tokens, rounds))
    direct, routed = (statistics.median(found[way]) * 1e3 for way in ("direct", "routed"))
    return {"streams": streams, "tok_s": rate, "direct_ms": round(direct, 3), "routed_ms": round(routed, 3),
            "added_ms": round(routed - direct, 3), "tokens": len(found["routed"]),
            "router_cpu_us_per_token": round(1e6 * cpu / len(found["routed"]), 1)}


async def _delay(streams: int, rate: float, tokens: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """The delays of all tokens, and the seconds of a processor that the router took."""
    found: dict[str, list[float]] = {"direct": [], "routed": []}
    async with _clock(streams / rate, tokens) as address:
        made = router([Running(address, 0)], new_secret(), "least-loaded")
        front = await asyncio.to_thread(made.__enter__)
        try:
            before = _cpu_seconds(front.pid)
            for _ in range(rounds):
                for way, at in (("direct", address), ("routed", front.address)):
                    found[way] += await _read_clock(at, streams)
            spent = _cpu_seconds(front.pid) - before
        finally:
            await asyncio.to_thread(made.__exit__, None, None, None)
    return found, spent


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _read_clock(address: str, streams: int) -> list[float]:
    late: list[float] = []

    def look(piece: bytes) -> None:
        now = time.perf_counter()
        late.extend(now - float(line[6:]) for line in piece.split(b"\n") if line.startswith(b"data: "))

    await asyncio.gather(*[ask(address, "/v1/completions", {"stream": True}, on_piece=look) for _ in range(streams)])
    return late


@contextlib.asynccontextmanager
async def _clock(pause: float, tokens: int) -> AsyncIterator[str]:
    """A server whose tokens are the time."""
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line.partition(b":")[2]) for line in head.lower().split(b"\r\n")
                               if line.startswith(b"content-length")), 0)
                await reader.readexactly(length)
                if head.startswith(b"GET"):
                    body = json.dumps({"data": [{"id": "clock"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                    continue
                writer.write(_HEAD)
                for _ in range(tokens):
                    await asyncio.sleep(pause)
                    event = b"data: %.9f\n\n" % time.perf_counter()
                    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def throughput(count: int, options: dict[str, Any], streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Output tokens per second of the same streams, to the servers themselves and through the router, in turns."""
    secret = new_secret()
    with replicas(count, options, secret) as servers, router(servers, secret, "least-loaded") as front:
        direct = [server.address for server in servers]
        found = asyncio.run(_in_turns(direct, front.address, streams, tokens, rounds))
    ratio = statistics.median(routed / alone for alone, routed in found)
    return {"replicas": count, "streams": streams, "direct_tok_s": round(statistics.median(a for a, _ in found), 1),
            "routed_tok_s": round(statistics.median(r for _, r in found), 1), "ratio": round(ratio, 4),
            "ratios": [round(routed / alone, 4) for alone, routed in found], "rounds": rounds}


async def _in_turns(direct: list[str], front: str, streams: int, tokens: int,
                    rounds: int) -> list[tuple[float, float]]:
    found = []
    for turn in range(-1, rounds):
        ways = [direct, [front]] if turn % 2 else [[front], direct]
        speeds = {len(way): await _speed(way, streams, tokens if turn >= 0 else 2, turn) for way in ways}
        if turn >= 0:  # the first one warms up
            found.append((speeds[len(direct)], speeds[1]))
    return found


async def _speed(addresses: list[str], streams: int, tokens: int, turn: int) -> float:
    body = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    replies = await asyncio.gather(*[
        ask(addresses[number % len(addresses)], "/v1/completions",
            {**body, "prompt": [number, turn & 0xFF, len(addresses), 7]}, timeout=3600.0)
        for number in range(streams)])
    spent = time.perf_counter() - began
    for reply in replies:
        if reply.status != 200 or not reply.complete:
            raise QuireError(f"a request failed with status {reply.status}: {reply.body[-300:]!r}")
    return streams * tokens / spent
