"""`quire bench offload`: do streams go on while a long prefix comes back from host memory?

Some streams decode; then a request arrives whose prompt is in the host tier. Measured is the time between two tokens of
the streams from that moment until the request has its first token: with nothing arriving, with KV arriving beside the
steps, and with every step waiting for the copies that it starts, as engines do that fetch inside a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_options, engine_options
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.executor.base import Executor
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import StepPlan, StepResult, TransferReport
from quire.scheduler.request import Request, Status

if TYPE_CHECKING:
    from quire.engine.assembly.engine import Engine
    from quire.engine.core import EngineCore

EXAMPLES = (
    "examples:\n"
    "  quire bench offload\n"
    "  quire bench offload --device cuda --model Qwen/Qwen3-8B --prefix-tokens 16384 --streams 32"
)
MODES = ("quiet", "beside", "inside")
_OWN = ("num_kv_blocks", "kv_cache_memory", "swap_space", "offload", "enable_prefix_caching", "skip_tokenizer_init",
        "tokenizer", "max_model_len", "preemption_mode")
_WARM_STEPS = 8
_STREAM_TOKENS = 1500
"""Of a stream, which is aborted when the measurement is over."""
_PATIENCE = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("workload")
    work.add_argument("--prefix-tokens", type=int, default=2048, metavar="N",
                      help="length of the prefix that comes back (default: %(default)s)")
    work.add_argument("--streams", type=int, default=4, metavar="N",
                      help="sequences that decode meanwhile (default: %(default)s)")
    work.add_argument("--repeats", type=int, default=5, metavar="N", help="times that it comes (default: %(default)s)")
    work.add_argument("--workload-seed", type=int, default=0, metavar="N", help="another seed, another workload")
    add_engine_options(parser, leave_out=_OWN)


class WaitingExecutor(Executor):
    """Waits for the transfers of every plan before it goes on, as if they were part of the step."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.arrivals = inner.arrivals

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future = self._inner.submit(plan)
        open_, until = {start.number for start in plan.transfers}, time.monotonic() + _PATIENCE
        reports: list[TransferReport] = []
        while open_ and time.monotonic() < until:
            if future.done() and future.exception() is None:
                reports += future.result().arrivals
            reports += self.arrivals.take()
            open_ -= {report.number for report in reports if report.finished}
            if open_:
                self.arrivals.wait(0.01)
        for report in reports:
            self.arrivals.put(report)
        return future


@dataclass(slots=True)
class Gaps:
    """Seconds between two tokens of the streams while the request was on its way, over all repeats."""

    all: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    """Of each repeat."""
    first_token: list[float] = field(default_factory=list)
    """From the request's arrival, of each repeat."""
    steps_beside: int = 0
    """Steps of the streams while its KV was on its way."""
    fetched_tokens: int = 0


def run(args: argparse.Namespace) -> int:
    from quire.machine import describe_machine

    if min(args.prefix_tokens, args.streams, args.repeats) < 1:
        raise ConfigError("--prefix-tokens, --streams and --repeats must be at least 1", "prefix_tokens")
    engine, block_bytes = _build(args)
    core = engine.core
    rng = random.Random(args.workload_seed)
    prefix = [rng.randrange(engine.spec.vocab_size) for _ in range(args.prefix_tokens)]
    plain, waiting = core.executor, WaitingExecutor(core.executor)
    try:
        _drain(core, _request("prime", [*prefix, 0], 1))
        found = {mode: Gaps() for mode in MODES}
        for repeat in range(-1, args.repeats):
            # In turns, so that a busy moment of the machine is nobody's alone; the first turn warms up.
            for mode in MODES:
                core.executor = waiting if mode == "inside" else plain
                gaps = found[mode] if repeat >= 0 else Gaps()
                _measure(engine, args, mode, prefix, f"{mode}-{repeat}", gaps)
    finally:
        core.executor = plain
        core.close()
    size = block_bytes * (args.prefix_tokens // engine.config.cache.block_size)
    lines = [_line(mode, found[mode], size) for mode in MODES]
    machine = describe_machine()
    for line in lines:
        print(json.dumps({"bench": "offload", **line, "model": engine.source.name, "streams": args.streams,
                          "prefix_tokens": args.prefix_tokens, "device": engine.config.model.device, **machine}),
              flush=True)
    print(table(lines), flush=True)
    if not found["beside"].fetched_tokens:
        print("nothing came back: by the measured rates, computing this prefix is cheaper than moving it", flush=True)
    return 0


def _build(args: argparse.Namespace) -> tuple[Engine, int]:
    """An engine whose pool and host tier both hold the prefix and the streams."""
    from quire.engine.assembly.engine import build_engine
    from quire.engine.assembly.source import open_source
    from quire.models.registry import read_spec

    options = engine_options(args)
    config = EngineConfig.create(**options)
    most = config.scheduler.num_seqs(gpu=config.model.device == "cuda")
    if args.streams >= most:
        raise ConfigError(f"--streams {args.streams} leaves no room for one request more: at most {most} sequences run "
                          "at once (--max-num-seqs)", "streams")
    if args.prefix_tokens < config.cache.block_size:
        raise ConfigError(f"--prefix-tokens {args.prefix_tokens} is less than one block of "
                          f"{config.cache.block_size} tokens: nothing would come back", "prefix_tokens")
    spec, size = read_spec(open_source(config).config), config.cache.block_size
    # A decoded token a step, while it primes, warms up and measures.
    longest = max(args.prefix_tokens, _STREAM_TOKENS) + 64
    blocks = 2 * -(-longest // size) + args.streams * -(-(_STREAM_TOKENS + 64) // size)
    block_bytes = spec.kv_bytes_per_token * size
    gib = 1.25 * blocks * block_bytes / (1 << 30)
    if longest > spec.max_positions:
        raise ConfigError(f"--prefix-tokens {args.prefix_tokens} is more than the model's {spec.max_positions} "
                          "positions hold", "prefix_tokens")
    return build_engine(EngineConfig.create(**options, num_kv_blocks=blocks, swap_space=gib, offload=True,
                                            max_model_len=longest), clock=time.monotonic), block_bytes


def _request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, seed=0, arrival_time=0.0)


def _drain(core: EngineCore, *requests: Request) -> None:
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    for request in requests:
        if request.sequences[0].error is not None:
            raise QuireError(f"a request of the benchmark failed: {request.sequences[0].error}")


def _evict(core: EngineCore) -> None:
    """All prefixes leave the device; what the host lacks of them is copied there."""
    cache = core.scheduler.cache
    until = time.monotonic() + _PATIENCE
    while not cache.make_room([pool.num_available for pool in cache.pools]) or cache.transfers.under_way:
        core.step()
        core.executor.arrivals.wait(0.01)
        if time.monotonic() > until:
            raise QuireError("the prefix was not copied to the host in a minute")


def _measure(engine: Engine, args: argparse.Namespace, mode: str, prefix: list[int], name: str, gaps: Gaps) -> None:
    core, rng = engine.core, random.Random(name)
    _evict(core)
    streams = [_request(f"{name}-s{i}", [rng.randrange(engine.spec.vocab_size) for _ in range(8)], _STREAM_TOKENS)
               for i in range(args.streams)]
    for stream in streams:
        core.add(stream)
    while any(stream.sequences[0].num_output_tokens < _WARM_STEPS for stream in streams):
        core.step()
    late = _request(f"{name}-late", [*prefix, 0], 1)
    began = last = time.perf_counter()
    mine: list[float] = []
    if mode != "quiet":
        core.add(late)
    while late.status is not Status.FINISHED and (mode != "quiet" or len(mine) < 32):
        known = streams[0].sequences[0].num_output_tokens
        core.step()
        now = time.perf_counter()
        if streams[0].sequences[0].num_output_tokens > known:
            mine.append(now - last)
            last = now
            gaps.steps_beside += late.status is Status.ARRIVING
    if mode != "quiet":
        gaps.first_token.append(time.perf_counter() - began)
        gaps.fetched_tokens = late.counts.tier_hit_tokens
    gaps.all += mine
    gaps.longest.append(max(mine))
    for stream in streams:
        core.abort(stream.request_id)
    while core.has_work:
        core.step()


def _line(mode: str, gaps: Gaps, size: int) -> dict[str, Any]:
    def milliseconds(seconds: float) -> float:
        return round(1e3 * seconds, 3)

    return {
        "mode": mode,
        "gap_ms_median": milliseconds(statistics.median(gaps.all)),
        "gap_ms_max_median": milliseconds(statistics.median(gaps.longest)),
        "gap_ms_max": milliseconds(max(gaps.longest)),
        "first_token_ms": milliseconds(statistics.median(gaps.first_token)) if gaps.first_token else None,
        "steps_beside": gaps.steps_beside,
        "fetched_tokens": gaps.fetched_tokens,
        "prefix_mb": round(size / 1e6, 1),
    }


def table(lines: list[dict[str, Any]]) -> str:
    rows = [f"{'KV comes':>9}  {'median gap':>11}  {'longest gap':>12}  {'worst':>9}  {'first token':>12}  "
            f"{'steps beside':>13}"]
    for line in lines:
        first = "–" if line["first_token_ms"] is None else f"{line['first_token_ms']:.1f} ms"
        rows.append(f"{line['mode']:>9}  {line['gap_ms_median']:>8.2f} ms  {line['gap_ms_max_median']:>9.2f} ms  "
                    f"{line['gap_ms_max']:>6.1f} ms  {first:>12}  {line['steps_beside']:>13}")
    return "\n".join(rows)
