"""A trace of conversations through a router: how many prefix tokens each policy finds, and how soon first tokens come.

A block of the trace stands for 512 tokens; here it is one KV block of `block_size` tokens, and time and outputs are
scaled with it, so that small servers see the same prefixes as large ones would.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.routing.fleet import new_secret, replicas, router
from quire.bench.serving.http_client import ask
from quire.bench.serving.load_report import percentile
from quire.errors import ConfigError, QuireError
from quire.router.policies import make_policy
from quire.sim.routing import Shape, arrivals_of, simulate

_TRACE_BLOCK = 512
_VOCABULARY = 32000
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """How the trace is played."""

    replicas: int
    blocks: int
    """Trace blocks that one replica holds."""
    requests: int
    rate: float
    """Requests per second, on average."""
    step_ms: float
    step_tokens: int


@dataclass(slots=True)
class TraceFound:
    prompt_tokens: int = 0
    found_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        return {"prefix_tokens": self.found_tokens, "prompt_tokens": self.prompt_tokens,
                "hit_rate": round(self.found_tokens / max(1, self.prompt_tokens), 4),
                "ttft_ms": {f"p{share}": round(percentile(self.first_tokens, share) * 1e3, 1)
                            for share in (50, 90, 99)} if self.first_tokens else {},
                "seconds": round(self.seconds, 1), "errors": len(self.errors), "first_errors": self.errors[:3]}


def read_trace(path: Path, most: int) -> list[dict[str, Any]]:
    """The first requests: their time in milliseconds, blocks and lengths."""
    try:
        with path.open() as file:
            found = [json.loads(line) for _, line in zip(range(most), file, strict=False)]
        for each in found:
            _ = each["timestamp"], each["hash_ids"], each["output_length"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no trace with timestamp, hash_ids and output_length in each line: {error!r}",
                          field="trace") from error
    return found


def prompt_of(request: dict[str, Any], number: int) -> list[int]:
    """A block of the trace is always the same tokens; the last token is the request's own."""
    tokens = []
    for block in request["hash_ids"]:
        first = (block * 2654435761) & 0xFFFFFFFF
        tokens += [(first + 40503 * place * place) % _VOCABULARY for place in range(_BLOCK_SIZE)]
    return [*tokens, number % _VOCABULARY]


def play(policy: str, trace: list[dict[str, Any]], load: TraceLoad) -> TraceFound:
    """The trace on fresh servers behind a router with this policy."""
    longest = max(len(each["hash_ids"]) for each in trace)
    options = {"executor": "dummy", "dummy_step_ms": load.step_ms, "max_num_batched_tokens": load.step_tokens,
               "block_size": _BLOCK_SIZE, "num_kv_blocks": max(load.blocks, 2 * longest + 8), "max_num_seqs": 64,
               "max_waiting_requests": 100000, "max_waiting_tokens": 1 << 30}
    secret = new_secret()
    with replicas(load.replicas, options, secret) as servers, router(servers, secret, policy) as front:
        found = asyncio.run(_play(front.address, trace, load.rate))
        for server in servers:
            found.found_tokens += asyncio.run(_counted(server.address, "quire:prompt_tokens_cached_total"))
            found.prompt_tokens += asyncio.run(_counted(server.address, "quire:prompt_tokens_total"))
    return found


def imagine(policy: str, trace: list[dict[str, Any]], load: TraceLoad) -> TraceFound:
    """The same in simulated time."""
    shape = Shape(load.blocks, _BLOCK_SIZE, load.step_ms / 1e3, load.step_tokens)
    found = simulate(make_policy(policy), arrivals_of(trace, load.rate, shape, _TRACE_BLOCK), load.replicas, shape)
    return TraceFound(found.prompt_tokens, found.found_tokens, found.first_tokens)


async def _play(address: str, trace: list[dict[str, Any]], rate: float) -> TraceFound:
    found = TraceFound()
    span = max(1e-9, (trace[-1]["timestamp"] - trace[0]["timestamp"]) / 1e3)
    scale = len(trace) / rate / span
    began = time.perf_counter()

    async def one(number: int, request: dict[str, Any]) -> None:
        await asyncio.sleep((request["timestamp"] - trace[0]["timestamp"]) / 1e3 * scale)
        tokens = max(1, request["output_length"] * _BLOCK_SIZE // _TRACE_BLOCK)
        body = {"prompt": prompt_of(request, number), "max_tokens": tokens, "stream": True, "ignore_eos": True}
        sent = time.perf_counter()
        try:
            reply = await ask(address, "/v1/completions", body, timeout=600.0)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            found.errors.append(repr(error))
            return
        if reply.status != 200 or not reply.complete:
            found.errors.append(f"{reply.status} {reply.body[-200:]!r}")
        else:
            found.first_tokens.append(reply.times[0] - sent)

    await asyncio.gather(*[one(number, request) for number, request in enumerate(trace)])
    found.seconds = time.perf_counter() - began
    return found


async def _counted(address: str, name: str) -> int:
    for line in (await ask(address, "/metrics")).body.decode().splitlines():
        if line.startswith(name):
            return int(float(line.rsplit(" ", 1)[1]))
    raise QuireError(f"{address} does not count {name}")
