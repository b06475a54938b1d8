"""`quire bench disaggregated`: Long prompts among streams, computed in chunks beside them or by another engine.

Some requests stream while long prompts arrive. One engine with chunked prefill, which has all threads, against a pair
of engines, which share them: time to the long prompts' first token, and the largest gap between two tokens of the
streams. Disaggregation buys latency, not throughput; the tokens per second of both are printed too."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.async_llm import AsyncLLM
from quire.cli.options import add_engine_options, engine_options, integer, number
from quire.sampling.params import SamplingParams

EXAMPLES = ("examples:\n  quire bench disaggregated\n"
            "  quire bench disaggregated --long-prompts 8 --prompt-tokens 1500 --rounds 3")


@dataclass(slots=True)
class Measured:
    first_token: list[float] = field(default_factory=list)
    """Seconds, of the long prompts."""
    largest_gap: list[float] = field(default_factory=list)
    """Seconds, of each stream."""
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=integer, default=4, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--stream-tokens", type=integer, default=150, metavar="N",
                        help="tokens of each (default: %(default)s)")
    parser.add_argument("--long-prompts", type=integer, default=4, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=integer, default=1000, metavar="N",
                        help="tokens of each (default: %(default)s)")
    parser.add_argument("--every", type=number, default=2.0, metavar="S",
                        help="seconds between long prompts (default: %(default)s)")
    parser.add_argument("--rounds", type=integer, default=1, metavar="N",
                        help="times that both are measured, in turn (default: %(default)s)")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    options = {"max_model_len": 4096, "skip_tokenizer_init": True, **engine_options(args)}
    threads = int(options.pop("num_threads", None) or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text(f"{random.SystemRandom().getrandbits(256):x}")
        found: dict[str, Measured] = {"one engine, chunked prefill": Measured(), "prefill apart": Measured()}
        for turn in range(args.rounds):
            asyncio.run(_one_engine(args, options, threads, turn, found["one engine, chunked prefill"]))
            asyncio.run(_pair(args, {**options, "kv_secret_file": str(secret)}, threads, turn, found["prefill apart"]))
    for name, measured in found.items():
        print(json.dumps({"bench": "disaggregated", "how": name, "threads": threads, "streams": args.streams,
                          "long_prompts": args.long_prompts, "prompt_tokens": args.prompt_tokens,
                          "rounds": args.rounds, **_summary(measured)}))
    return 0


def _summary(measured: Measured) -> dict[str, float]:
    gaps = sorted(measured.gaps)
    return {"first_token_ms_median": round(1e3 * statistics.median(measured.first_token), 1),
            "first_token_ms_worst": round(1e3 * max(measured.first_token), 1),
            "gap_ms_median": round(1e3 * statistics.median(gaps), 1),
            "gap_ms_p99": round(1e3 * gaps[int(0.99 * (len(gaps) - 1))], 1),
            "largest_gap_ms": round(1e3 * max(measured.largest_gap), 1),
            "tokens_per_second": round(measured.tokens / measured.seconds, 1)}


async def _one_engine(args: argparse.Namespace, options: dict[str, Any], threads: int, turn: int,
                      found: Measured) -> None:
    async with await AsyncLLM.start(**options, num_threads=threads) as engine:
        await _load(engine, args, turn, found)


async def _pair(args: argparse.Namespace, options: dict[str, Any], threads: int, turn: int, found: Measured) -> None:
    """The decoding engine needs few threads and the other one the rest; with two, each has one."""
    mine = max(1, threads // 2)
    async with await AsyncLLM.start(**options, kv_role="prefill", num_threads=max(1, threads - mine)) as other:
        host, port = other.kv_listens or ("", 0)
        async with await AsyncLLM.start(**options, kv_role="decode", kv_peers=f"kv://{host}:{port}",
                                        num_threads=mine) as engine:
            await _load(engine, args, turn, found)
            arrived = (await engine.metrics(refresh=True))["kv_prompts_arrived"]
            if arrived < args.long_prompts:
                raise SystemExit(f"only {arrived} of {args.long_prompts} long prompts came from the other engine")


async def _load(engine: AsyncLLM, args: argparse.Namespace, turn: int, found: Measured) -> None:
    dice = random.Random(turn)
    await _stream(engine, _prompt(dice, 40), 4, Measured())  # whoever is first pays for pages and links
    began = time.perf_counter()
    streams = [asyncio.create_task(_stream(engine, _prompt(dice, 24), args.stream_tokens, found))
               for _ in range(args.streams)]
    asked = []
    for _ in range(args.long_prompts):
        await asyncio.sleep(args.every)
        asked.append(asyncio.create_task(_long(engine, _prompt(dice, args.prompt_tokens), found)))
    await asyncio.gather(*streams, *asked)
    found.seconds += time.perf_counter() - began


def _prompt(dice: random.Random, tokens: int) -> list[int]:
    return [dice.randrange(100, 1000) for _ in range(tokens)]


async def _stream(engine: AsyncLLM, prompt: list[int], tokens: int, found: Measured) -> None:
    last, largest = 0.0, 0.0
    async for output in engine.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True),
                                        output_kind="delta"):
        now = time.perf_counter()
        if last:
            found.gaps.append(now - last)
            largest = max(largest, now - last)
        last = now
        found.tokens += len(output.outputs[0].token_ids)
    found.largest_gap.append(largest)


async def _long(engine: AsyncLLM, prompt: list[int], found: Measured) -> None:
    asked = time.perf_counter()
    async for output in engine.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True), output_kind="delta"):
        if asked:
            found.first_token.append(time.perf_counter() - asked)
            asked = 0.0
        found.tokens += len(output.outputs[0].token_ids)
