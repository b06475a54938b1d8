"""`quire bench http`: What serving costs: HTTP, an instant model under wrk, chunked prefill, structured output.

Cases: `throughput` runs the same requests through `LLM.generate` and through HTTP with as many streams, in turns;
`instant` lets wrk drive a model that answers at once; `prefill-gap` looks for the longest pause in eight streams while
a long prompt is computed, with chunks and without; `structured` runs streams under a JSON schema and without, in
turns."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.bench.serving.http_client import Reply, ask
from quire.bench.serving.served import serve_process, served
from quire.cli.options import add_engine_options, engine_options, integer
from quire.errors import QuireError

EXAMPLES = ("examples:\n  quire bench http\n  quire bench http --case instant --connections 32\n"
            "  quire bench http --case prefill-gap --prompt-tokens 4096")
CASES = ("throughput", "instant", "prefill-gap", "structured")
_WORDS = "The quick brown fox jumps over the lazy dog while the river runs slowly to the sea. "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("cases")
    own.add_argument("--case", choices=CASES, action="append", help="may be given several times (default: all)")
    own.add_argument("--streams", type=integer, default=16, metavar="N",
                     help="requests at once of throughput and structured (default: %(default)s)")
    own.add_argument("--output-tokens", type=integer, default=64, metavar="N",
                     help="tokens of each of them (default: %(default)s)")
    own.add_argument("--rounds", type=integer, default=5, metavar="N",
                     help="of throughput and structured (default: %(default)s)")
    own.add_argument("--connections", type=integer, default=32, metavar="N", help="of wrk (default: %(default)s)")
    own.add_argument("--seconds", type=integer, default=10, metavar="N", help="of wrk (default: %(default)s)")
    own.add_argument("--prompt-tokens", type=integer, default=4096, metavar="N",
                     help="of the long prompt of prefill-gap (default: %(default)s)")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.machine import describe_machine

    machine = describe_machine()
    options = engine_options(args)
    for case in args.case or CASES:
        if case == "throughput":
            found = throughput(options, args.streams, args.output_tokens, args.rounds)
        elif case == "instant":
            found = instant(options, args.connections, args.seconds)
        elif case == "structured":
            found = asyncio.run(structured(options, args.streams, args.output_tokens, args.rounds))
        else:
            found = prefill_gap(options, args.prompt_tokens)
        print(json.dumps({"bench": "http", "case": case, **found, **machine}), flush=True)
    return 0


# ---- throughput


def throughput(options: dict[str, Any], streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Output tokens per second of both ways, in turns: medians, and the median of each round's ratio."""
    found = asyncio.run(_in_turns(options, streams, tokens, rounds))
    offline, online = [one for one, _ in found], [other for _, other in found]
    ratio = statistics.median(other / one for one, other in found)
    return {"streams": streams, "offline_tok_s": round(statistics.median(offline), 1),
            "http_tok_s": round(statistics.median(online), 1), "ratio": round(ratio, 3), "rounds": rounds}


async def _in_turns(options: dict[str, Any], streams: int, tokens: int, rounds: int) -> list[tuple[float, float]]:
    """(offline, HTTP) of each round. Both engines are there all the time; the other one rests."""
    from quire import LLM, SamplingParams

    found = []
    with LLM(**options) as llm:
        async with served({}, options) as (address, _, _engine):
            for turn in range(-1, rounds):
                prompts = [f"{turn}/{number}. {_WORDS * (1 + number % 4)}" for number in range(streams)]
                params = SamplingParams(max_tokens=tokens if turn >= 0 else 2, temperature=0.0, ignore_eos=True)
                began = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                middle = time.perf_counter()
                await _stream_all(address, prompts, params.max_tokens or 1)
                ended = time.perf_counter()
                if turn >= 0:  # the first one warms up
                    found.append((streams * tokens / (middle - began), streams * tokens / (ended - middle)))
    return found


async def _stream_all(address: str, prompts: list[str], tokens: int, **fields: Any) -> None:
    body = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "stream": True, **fields}
    _check(await asyncio.gather(*[ask(address, "/v1/completions", {**body, "prompt": prompt}, timeout=3600.0)
                                  for prompt in prompts]))


def _check(replies: list[Reply]) -> None:
    for reply in replies:
        if reply.status != 200 or not reply.complete:
            raise QuireError(f"a request failed with status {reply.status}: {reply.body[-300:]!r}")


# ---- structured output


async def structured(options: dict[str, Any], streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Output tokens per second of plain streams and of streams under a schema, in turns: medians, and the median of
    each round's ratio."""
    person = {"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}}}, "required": ["name", "age", "tags"]}
    shape = {"json": {"type": "array", "items": person, "minItems": tokens}}  # it goes on to the last token
    found = []
    async with served({}, options) as (address, _, _engine):
        for turn in range(-1, rounds):
            prompts = [f"{turn}/{number}. A list of people as JSON:" for number in range(streams)]
            count = tokens if turn >= 0 else 2  # the first one warms up
            began = time.perf_counter()
            await _stream_all(address, prompts, count)
            middle = time.perf_counter()
            await _stream_all(address, prompts, count, structured_outputs=shape)
            ended = time.perf_counter()
            if turn >= 0:
                found.append((streams * tokens / (middle - began), streams * tokens / (ended - middle)))
    return {"streams": streams, "plain_tok_s": round(statistics.median(plain for plain, _ in found), 1),
            "structured_tok_s": round(statistics.median(shaped for _, shaped in found), 1),
            "ratio": round(statistics.median(shaped / plain for plain, shaped in found), 3), "rounds": rounds}


# ---- an instant model under wrk


def instant(options: dict[str, Any], connections: int, seconds: int) -> dict[str, Any]:
    """Streamed tokens per second of a model that costs nothing, as the server counts them."""
    if shutil.which("wrk") is None:
        raise QuireError("the case instant is driven by wrk, which is not installed: apt-get install wrk")
    body = json.dumps({"prompt": "Hello", "max_tokens": 256, "stream": True, "ignore_eos": True})
    script = f"wrk.method = 'POST'\nwrk.headers['Content-Type'] = 'application/json'\nwrk.body = '{body}'\n"
    flags = ["--max-waiting-requests", str(2 * connections + 64)]
    with serve_process({**options, "executor": "dummy"}, flags) as address, \
            tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "post.lua"
        path.write_text(script)
        before, began = _generated(address), time.perf_counter()
        done = subprocess.run(["wrk", "-t1", "--timeout", "120s", f"-c{connections}", f"-d{seconds}s", "-s", str(path),
                               f"{address}/v1/completions"], capture_output=True, text=True, check=True)
        spent = time.perf_counter() - began
        tokens = _generated(address) - before
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise QuireError(f"wrk saw errors: {done.stdout}")
    return {"connections": connections, "tokens": int(tokens), "streamed_tok_s": round(tokens / spent, 1),
            "driver": "wrk"}


def _generated(address: str) -> float:
    text = asyncio.run(ask(address, "/metrics")).body.decode()
    line = next(line for line in text.splitlines() if line.startswith("quire:generation_tokens_total"))
    return float(line.rsplit(" ", 1)[1])


# ---- chunked prefill


def prefill_gap(options: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """The longest pause of eight streams while a long prompt is computed, in seconds."""
    gaps = {chunked: asyncio.run(_largest_gap({**options, "enable_chunked_prefill": chunked}, prompt_tokens))
            for chunked in (True, False)}
    return {"prompt_tokens": prompt_tokens, "gap_chunked_s": round(gaps[True], 4),
            "gap_whole_s": round(gaps[False], 4), "ratio": round(gaps[False] / gaps[True], 2)}


async def _largest_gap(options: dict[str, Any], prompt_tokens: int) -> float:
    fitting = {"max_model_len": prompt_tokens + 64, "enable_prefix_caching": False}
    async with served({"request_timeout": 3600.0}, {**options, **fitting}) as (address, _, _engine):
        times: list[list[float]] = [[] for _ in range(8)]

        async def follow(number: int) -> None:
            body = {"prompt": [100 + number], "max_tokens": prompt_tokens, "ignore_eos": True, "stream": True}
            await ask(address, "/v1/completions", body, timeout=3600.0,
                      on_piece=lambda _: times[number].append(time.perf_counter()))

        streams = [asyncio.create_task(follow(number)) for number in range(8)]
        while min(map(len, times)) < 4:  # until all of them decode
            await asyncio.sleep(0.05)
        arrived = time.perf_counter()
        ids = [1000 + number % 10000 for number in range(prompt_tokens)]
        long = await ask(address, "/v1/completions", {"prompt": ids, "max_tokens": 1, "stream": True}, timeout=3600.0)
        _check([long])
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return max(pauses(each, arrived, long.times[0]) for each in times)


def pauses(times: list[float], begin: float, end: float) -> float:
    """The longest time without a token between two moments."""
    inside = [begin, *[moment for moment in times if begin < moment < end], end]
    return max(after - before for before, after in pairwise(inside))
