"""`quire bench policies`: one seeded workload through each way of batching, with latencies and a timeline.

Requests arrive over time. Static batching lets nobody join until all have finished; prefill-first computes
whole prompts as soon as they come; decode-first lets streams go on, with prompts whole, in chunks, or in
chunks sized to hold a bound on the time between two tokens. Each trades throughput, first token and stutter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.bench.figures.drawing import check_drawable
from quire.bench.scheduling.arrivals import Arrival, Story, arrivals, play, quantile
from quire.cli.options import add_engine_options, engine_options
from quire.config import ModelConfig
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.llm import LLM

EXAMPLES = (
    "examples:\n"
    "  quire bench policies --plot policies.png\n"
    "  quire bench policies --requests 40 --rate 1 --itl-slo-ms 200"
)
_OWN = ("batching_policy", "enable_chunked_prefill", "itl_slo_ms", "max_num_seqs", "max_num_batched_tokens",
        "enable_prefix_caching", "skip_tokenizer_init", "tokenizer")


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with the options that make it one."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


def contenders(batch: int, chunk: int, longest: int, slo_ms: float) -> list[Contender]:
    """Those without chunks get a step that holds the whole prompts of a batch."""
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(2048, batch * longest)}
    chunked = {"batching_policy": "decode-first", "max_num_batched_tokens": chunk}
    return [
        Contender("static", {"batching_policy": "static", **whole}),
        Contender("prefill-first", {"batching_policy": "prefill-first", **whole}),
        Contender("decode-first, whole prompts", {"batching_policy": "decode-first", **whole}),
        Contender(f"decode-first, chunks of {chunk}", chunked),
        Contender(f"decode-first, bound of {slo_ms:.0f} ms",
                  {**chunked, "max_num_batched_tokens": 2048, "itl_slo_ms": slo_ms}),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=16, metavar="N", help="how many (default: %(default)s)")
    work.add_argument("--rate", type=float, default=0.5, metavar="X",
                      help="arrivals per second, Poisson (default: %(default)s)")
    work.add_argument("--prompt-tokens", type=int, nargs=2, default=[32, 512], metavar=("LOW", "HIGH"),
                      help="length of a prompt, uniform (default: 32 512)")
    work.add_argument("--output-tokens", type=int, nargs=2, default=[16, 96], metavar=("LOW", "HIGH"),
                      help="tokens generated for each, uniform (default: 16 96)")
    work.add_argument("--workload-seed", type=int, default=0, metavar="N",
                      help="another seed, another workload (default: 0)")
    shown = parser.add_argument_group("comparison")
    shown.add_argument("--batch", type=int, default=8, metavar="N", help="most requests at once (default: 8)")
    shown.add_argument("--chunk", type=int, default=64, metavar="N",
                       help="tokens of a step with chunks (default: 64)")
    shown.add_argument("--itl-slo-ms", type=float, metavar="X",
                       help="bound on the time between two tokens (default: four full decoding steps)")
    shown.add_argument("--plot", metavar="FILE", help="draw the timelines: .png or .svg")
    add_engine_options(parser, leave_out=_OWN)


def run(args: argparse.Namespace) -> int:
    from quire.machine import describe_machine

    _check(args)
    machine = describe_machine()
    slo_ms = args.itl_slo_ms or _calibrate(args)
    stories: dict[str, list[Story]] = {}
    lines: list[dict[str, Any]] = []
    for contender in contenders(args.batch, args.chunk, args.prompt_tokens[1], slo_ms):
        with _open(args, contender.options) as llm:
            found = _measure(llm, _workload(args, llm.vocab_size))
        stories[contender.name] = found
        line = {"bench": "policies", "policy": contender.name, **summary(found, slo_ms / 1e3)}
        lines.append(line)
        print(json.dumps({**line, **_described(args, slo_ms), **machine}), flush=True)
    print(table(lines, slo_ms), flush=True)
    if args.plot:
        from quire.bench.scheduling.timeline import draw_timeline

        title = f"{args.requests} requests, {args.rate:g} per second"
        path = draw_timeline(stories, slo_ms / 1e3, title).save(args.plot)
        print(f"timeline: {path}")
    return 0


def summary(stories: Sequence[Story], bound: float) -> dict[str, Any]:
    """Throughput and latencies of one run, in tokens per second and milliseconds."""
    gaps = [gap for story in stories for gap in story.gaps]
    tokens = sum(len(story.tokens) for story in stories)
    seconds = max(story.tokens[-1] for story in stories)
    return {
        "output_tok_s": round(tokens / seconds, 2), "seconds": round(seconds, 2),
        **_spread("ttft_ms", [story.first_token_time for story in stories]),
        **_spread("itl_ms", gaps),
        "gaps_within_slo": round(sum(gap <= bound for gap in gaps) / len(gaps), 4) if gaps else None,
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    values = [1e3 * value for value in seconds]
    if not values:
        return {f"{name}_{part}": None for part in ("mean", "p50", "p99", "max")}
    parts = {"mean": statistics.fmean(values), "p50": quantile(values, 0.5), "p99": quantile(values, 0.99),
             "max": max(values)}
    return {f"{name}_{part}": round(value, 1) for part, value in parts.items()}


_COLUMNS = (
    ("output_tok_s", "tok/s"), ("ttft_ms_mean", "mean"), ("ttft_ms_p50", "p50"), ("ttft_ms_p99", "p99"),
    ("ttft_ms_max", "max"), ("itl_ms_mean", "mean"), ("itl_ms_p50", "p50"), ("itl_ms_p99", "p99"),
    ("itl_ms_max", "max"),
)  # fmt: skip


def table(lines: Sequence[dict[str, Any]], slo_ms: float) -> str:
    """The figures for people: one row for each policy."""
    width = max(len(line["policy"]) for line in lines)
    within = f"<= {slo_ms:.0f} ms"
    head = "".join(f"{title:>9}" for _, title in _COLUMNS) + f"{within:>12}"
    over = f"{'':{width}}{'':9}{'time to first token, ms':>36}{'between tokens, ms':>36}{'gaps':>12}"
    rows = [over, f"{'policy':{width}}{head}"]
    for line in lines:
        cells = "".join(f"{_cell(line[key]):>9}" for key, _ in _COLUMNS)
        share = line["gaps_within_slo"]
        rows.append(f"{line['policy']:{width}}{cells}{'-' if share is None else f'{share:.1%}':>12}")
    return "\n".join(rows)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _check(args: argparse.Namespace) -> None:
    ranges = {"--prompt-tokens": args.prompt_tokens, "--output-tokens": args.output_tokens}
    for name, (low, high) in ranges.items():
        if not 1 <= low <= high:
            raise QuireError(f"{name} wants two numbers from 1 on, the smaller one first, not {low} {high}")
    check_drawable(args.plot)
    for name, value in (("--requests", args.requests), ("--rate", args.rate), ("--batch", args.batch),
                        ("--chunk", args.chunk)):
        if value <= 0:
            raise QuireError(f"{name} must be more than 0, not {value}")


def _workload(args: argparse.Namespace, vocab_size: int) -> list[Arrival]:
    prompts, outputs = tuple(args.prompt_tokens), tuple(args.output_tokens)
    return arrivals(args.requests, args.rate, prompts, outputs, vocab_size, args.workload_seed)


def _described(args: argparse.Namespace, slo_ms: float) -> dict[str, Any]:
    return {
        "model": engine_options(args).get("model", ModelConfig().model),
        "requests": args.requests, "rate": args.rate, "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens, "seed": args.workload_seed, "batch": args.batch,
        "itl_slo_ms": round(slo_ms, 1),
    }


def _open(args: argparse.Namespace, options: dict[str, Any]) -> LLM:
    from quire.llm import LLM

    longest = args.prompt_tokens[1] + args.output_tokens[1] + 1
    fixed = {"max_num_seqs": args.batch, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    return LLM(**{"max_model_len": longest, **engine_options(args), **fixed, **options})


def _measure(llm: LLM, work: Sequence[Arrival]) -> list[Story]:
    """The workload after a warm-up, so that nobody pays for first touches of memory."""
    play(llm, [Arrival(0.0, work[0].prompt[:16], 4)])
    return play(llm, work)


def _calibrate(args: argparse.Namespace) -> float:
    """Milliseconds of four steps in which a full batch decodes at the workload's usual length."""
    with _open(args, {}) as llm:
        length = sum(args.prompt_tokens) // 2
        full = [Arrival(0.0, [i % (llm.vocab_size - 1) + 1] * length, 12) for i in range(args.batch)]
        play(llm, [Arrival(0.0, [1] * 16, 4)])
        began = time.perf_counter()
        gaps = [gap for story in play(llm, full) for gap in story.gaps[2:]]
        if not gaps:
            return 4e3 * (time.perf_counter() - began)
    return 4e3 * statistics.median(gaps)
