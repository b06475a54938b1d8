"""`quire bench view`: What it costs the engine to be watched: the same requests with and without somebody watching.

Both ways take turns in one server, with the order changed from round to round. `loss` is the share of throughput that
watching takes, the median over the rounds; `view_share` is the time that the engine itself counted, which does not
depend on what else the machine does. The page is one watcher; --watchers makes it several."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import select
import statistics
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from quire.bench.serving.served import served
from quire.child import child_environment, module_command
from quire.cli.options import add_engine_options, engine_options, integer

EXAMPLES = ("examples:\n  quire bench view\n  quire bench view --executor dummy --dummy-step-ms 3 --streams 128\n"
            "  quire bench view --device cuda --streams 256 --output-tokens 512")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("workload")
    own.add_argument("--streams", type=integer, default=16, metavar="N", help="requests at once (default: %(default)s)")
    own.add_argument("--prompt-tokens", type=integer, default=64, metavar="N",
                     help="of each, all different (default: %(default)s)")
    own.add_argument("--output-tokens", type=integer, default=64, metavar="N", help="of each (default: %(default)s)")
    own.add_argument("--rounds", type=integer, default=5, metavar="N",
                     help="pairs of runs, after one to warm up (default: %(default)s)")
    own.add_argument("--watchers", type=integer, default=1, metavar="N",
                     help="connections that watch (default: %(default)s)")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.machine import describe_machine

    machine = describe_machine()
    figures = asyncio.run(measure(args, engine_options(args)))
    print(json.dumps({"bench": "view", **figures, **machine}), flush=True)
    return 0


async def measure(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    plain: list[float] = []
    watched: list[float] = []
    seen = _Seen()
    async with served({}, options) as (address, _, llm):
        for turn in range(1 + args.rounds):
            pair: dict[bool, float] = {}
            for watching in (False, True) if turn % 2 else (True, False):
                await llm.clear_prefix_cache()
                async with _watchers(address, args.watchers if watching else 0, seen):
                    pair[watching] = await _load(llm, args, turn)
            if turn:
                plain.append(pair[False])
                watched.append(pair[True])
    loss = statistics.median(1 - ours / theirs for ours, theirs in zip(watched, plain, strict=True))
    return {
        "streams": args.streams, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens,
        "rounds": args.rounds, "watchers": args.watchers, "tok_s": round(statistics.median(plain), 1),
        "watched_tok_s": round(statistics.median(watched), 1), "loss": round(loss, 4),
        "view_share": round(statistics.median(seen.costs[1:] or seen.costs), 5), "frames": seen.frames,
        "bytes_per_frame": round(seen.size / max(1, seen.frames)),
    }


async def _load(llm: Any, args: argparse.Namespace, turn: int) -> float:
    """Output tokens per second of all requests at once."""
    from quire.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)

    async def one(number: int) -> None:
        prompt = [(7919 * (number + args.streams * turn) + i) % (llm.vocab_size - 1) for i in range(args.prompt_tokens)]
        async for _ in llm.generate(prompt, params, output_kind="delta"):
            pass

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(args.streams)))
    return float(args.streams * args.output_tokens / (time.perf_counter() - began))


class _Seen:
    """What the watchers saw, over all runs."""

    def __init__(self) -> None:
        self.frames = 0
        self.size = 0
        self.costs: list[float] = []
        """Share of the engine's time, as the last frame of each run says."""

    def add(self, line: bytes) -> None:
        frames, size, cost = json.loads(line)
        self.frames += frames
        self.size += size
        self.costs.append(cost)


@contextlib.asynccontextmanager
async def _watchers(address: str, count: int, seen: _Seen) -> AsyncIterator[None]:
    """So many connections that read frames, as the page does: each in a process of its own, as a browser is."""
    readers = [await asyncio.create_subprocess_exec(
        *module_command("quire.bench.serving.view", address), env=child_environment(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE) for _ in range(count)]
    try:
        for reader in readers:
            assert reader.stdout is not None
            await asyncio.wait_for(reader.stdout.readline(), 60)
        yield
        for reader in readers:
            seen.add((await asyncio.wait_for(reader.communicate(b""), 60))[0])
    finally:
        for reader in readers:
            if reader.returncode is None:
                reader.kill()
                await reader.wait()


def _read_frames(address: str) -> None:
    """Says when the first frame has come, and what it has seen when its input ends."""
    import httpx

    frames, size, cost = 0, 0, 0.0
    with httpx.Client(timeout=None) as client, client.stream("GET", f"{address}/v1/engine/events") as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                frames, size, cost = frames + 1, size + len(line), json.loads(line[6:]).get("cost", 0.0)
                if frames == 1:
                    print("ready", flush=True)
            # Once a second there is a comment at least, so the end is noticed.
            if select.select([sys.stdin], [], [], 0)[0]:
                break
    print(json.dumps([frames, size, cost]), flush=True)


if __name__ == "__main__":
    _read_frames(sys.argv[1])
