"""`quire bench pressure`: one load against KV pools that are too small for it, in each mode of preemption.

The pool shrinks from all that the load needs to a tenth. What is preempted is computed again, moved to host
memory, or whichever the cost model says; every request still ends with the same tokens, which is checked.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.figures.drawing import Drawing, check_drawable
from quire.cli.options import add_engine_options, engine_options
from quire.config import CacheConfig, EngineConfig, ModelConfig
from quire.errors import QuireError
from quire.sampling.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.outputs.output import RequestOutput
    from quire.llm import LLM

EXAMPLES = (
    "examples:\n"
    "  quire bench pressure\n"
    "  quire bench pressure --requests 40 --shares 1 0.25 0.1 --modes swap recompute"
)
_OWN = ("num_kv_blocks", "kv_cache_memory", "swap_space", "preemption_mode", "skip_tokenizer_init", "tokenizer",
        "max_model_len", "enable_prefix_caching", "offload")
_COLORS = {"recompute": "#c0504d", "swap": "#4f81bd", "auto": "#4a9a4a"}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all come at once."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    def blocks(self, block_size: int) -> int:
        """What all of it would hold at its longest, if nothing were shared."""
        return sum(each.n * -(-(len(prompt) + (each.max_tokens or 0)) // block_size)
                   for prompt, each in zip(self.prompts, self.params, strict=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("workload")
    work.add_argument("--requests", type=int, default=24, metavar="N", help="how many (default: %(default)s)")
    work.add_argument("--prompt-tokens", type=int, nargs=2, default=[32, 256], metavar=("LOW", "HIGH"),
                      help="length of a prompt, uniform (default: 32 256)")
    work.add_argument("--output-tokens", type=int, nargs=2, default=[16, 96], metavar=("LOW", "HIGH"),
                      help="tokens generated for each, uniform (default: 16 96)")
    work.add_argument("--group", type=int, default=2, metavar="N",
                      help="every fourth request has this many sequences (default: %(default)s)")
    work.add_argument("--workload-seed", type=int, default=0, metavar="N", help="another seed, another workload")
    shown = parser.add_argument_group("comparison")
    shown.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1], metavar="X",
                       help="sizes of the pool, as shares of what the load needs (default: 1 0.5 0.25 0.1)")
    shown.add_argument("--modes", nargs="+", default=["recompute", "swap", "auto"], metavar="MODE",
                       choices=["recompute", "swap", "auto"], help="modes of preemption (default: all)")
    shown.add_argument("--swap-gib", type=float, default=1.0, metavar="X",
                       help="host memory for swap and auto (default: 1)")
    shown.add_argument("--repeats", type=int, default=2, metavar="N",
                       help="runs of each, of which the fastest counts (default: %(default)s)")
    shown.add_argument("--plot", metavar="FILE", default="pressure.png",
                       help="where to draw the comparison: .png or .svg (default: %(default)s; '': nowhere)")
    add_engine_options(parser, leave_out=_OWN)


def run(args: argparse.Namespace) -> int:
    from quire.machine import describe_machine

    _check(args)
    check_drawable(args.plot)
    machine = describe_machine()
    lines: list[dict[str, Any]] = []
    expected: list[list[list[int]]] | None = None
    for share in sorted(args.shares, reverse=True):
        for mode in args.modes:
            line, tokens = _measure(args, share, mode)
            expected = tokens if expected is None else expected
            if tokens != expected:
                raise QuireError(f"mode {mode} with {share:g} of the pool gave other tokens: please report this")
            lines.append(line)
            print(json.dumps({"bench": "pressure", **line, **_described(args), **machine}), flush=True)
    print(table(lines), flush=True)
    if args.plot:
        print(f"picture: {draw(lines).save(args.plot)}")
    return 0


def make_load(args: argparse.Namespace, vocab_size: int) -> Load:
    rng = random.Random(args.workload_seed)
    prompts, params = [], []
    for i in range(args.requests):
        prompts.append([rng.randrange(vocab_size) for _ in range(rng.randint(*args.prompt_tokens))])
        params.append(SamplingParams(n=args.group if i % 4 == 3 else 1, seed=i, ignore_eos=True, temperature=1.0,
                                     max_tokens=rng.randint(*args.output_tokens)))
    return Load(prompts, params)


def _measure(args: argparse.Namespace, share: float, mode: str) -> tuple[dict[str, Any], list[list[list[int]]]]:
    from quire.engine.assembly.source import open_source
    from quire.llm import LLM

    options = engine_options(args)
    source = open_source(EngineConfig.create(**options), progress=False)
    load = make_load(args, int(source.config["vocab_size"]))
    block_size = options.get("block_size", CacheConfig().block_size)
    largest = max(each.n * -(-(len(prompt) + (each.max_tokens or 0)) // block_size)
                  for prompt, each in zip(load.prompts, load.params, strict=True))
    blocks = max(largest, int(load.blocks(block_size) * share))
    swap = 0.0 if mode == "recompute" else args.swap_gib
    # Without a prefix cache what is preempted is really gone: that is what this measures.
    with LLM(**options, num_kv_blocks=blocks, swap_space=swap, preemption_mode=mode, skip_tokenizer_init=True,
             enable_prefix_caching=False) as llm:
        llm.generate([load.prompts[0][:16]], SamplingParams(max_tokens=4), use_tqdm=False)
        seconds, counted, outputs = min((_timed(llm, load) for _ in range(args.repeats)), key=lambda run: run[0])
    waits = [output.metrics.latency or 0.0 for output in outputs]
    line = {"mode": mode, "share": share, "num_kv_blocks": blocks, "seconds": round(seconds, 3),
            "output_tok_s": round(counted["output_tokens"] / seconds, 2),
            "completion_s_mean": round(statistics.fmean(waits), 3),
            "completion_s_p50": round(statistics.median(waits), 3), "completion_s_max": round(max(waits), 3),
            **counted}
    return line, [[list(one.token_ids) for one in output.outputs] for output in outputs]


def _timed(llm: LLM, load: Load) -> tuple[float, dict[str, int | float], list[RequestOutput]]:
    """Seconds of the whole load, what was counted meanwhile, and the outputs."""
    before = llm.metrics()
    began = time.perf_counter()
    outputs = llm.generate(load.prompts, load.params, use_tqdm=False)
    seconds = time.perf_counter() - began
    after = llm.metrics()
    names = ("output_tokens", "preemptions", "swaps_out", "swaps_in", "swap_bytes_out", "swap_bytes_in",
             "recomputed_tokens", "copies_on_write", "steps")
    return seconds, {name: after[name] - before[name] for name in names}, outputs


def table(lines: list[dict[str, Any]]) -> str:
    """The figures for people."""
    rows = [f"{'pool':>6}{'mode':>11}{'tok/s':>9}{'mean s':>9}{'max s':>9}{'preempted':>11}{'swaps':>7}"
            f"{'MB moved':>10}{'recomputed':>12}"]
    for line in lines:
        moved = (line["swap_bytes_out"] + line["swap_bytes_in"]) / 1e6
        rows.append(f"{line['share']:>6.0%}{line['mode']:>11}{line['output_tok_s']:>9.1f}"
                    f"{line['completion_s_mean']:>9.2f}{line['completion_s_max']:>9.2f}{line['preemptions']:>11}"
                    f"{line['swaps_out']:>7}{moved:>10.1f}{line['recomputed_tokens']:>12}")
    return "\n".join(rows)


def draw(lines: list[dict[str, Any]]) -> Drawing:
    """Bars of throughput and of mean completion time, by pool size and mode."""
    picture = Drawing(760, 330)
    picture.text(20, 26, "KV pool too small for the load", 15, bold=True)
    modes = list(dict.fromkeys(line["mode"] for line in lines))
    for place, mode in enumerate(modes):
        picture.rect(420 + 110 * place, 16, 12, 12, _COLORS[mode])
        picture.text(437 + 110 * place, 26, mode, 12)
    _bars(picture, lines, "output_tok_s", "output tokens per second", 20)
    _bars(picture, lines, "completion_s_mean", "mean seconds until a request is complete", 390)
    return picture


def _bars(picture: Drawing, lines: list[dict[str, Any]], field: str, title: str, left: float) -> None:
    picture.text(left, 56, title, 12, bold=True)
    shares = sorted({line["share"] for line in lines}, reverse=True)
    highest = max(line[field] for line in lines) or 1.0
    wide = 350 / len(shares)
    picture.line(left, 280, left + 350, 280, "#888888")
    for place, share in enumerate(shares):
        group = [line for line in lines if line["share"] == share]
        bar = (wide - 14) / len(group)
        for i, line in enumerate(group):
            height = 195 * line[field] / highest
            x = left + place * wide + 7 + i * bar
            picture.rect(x, 280 - height, bar - 3, height, _COLORS[line["mode"]])
            picture.text(x + bar / 2 - 1.5, 275 - height, _short(line[field]), 9, anchor="middle")
        picture.text(left + place * wide + wide / 2, 298, f"{share:.0%} of the load", 11, anchor="middle")


def _short(figure: float) -> str:
    return f"{figure:.3g}" if figure < 1000 else f"{figure:.0f}"


def _described(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": engine_options(args).get("model", ModelConfig().model), "requests": args.requests,
            "prompt_tokens": args.prompt_tokens, "generated_tokens": args.output_tokens, "group": args.group,
            "seed": args.workload_seed}


def _check(args: argparse.Namespace) -> None:
    if args.plot and not Path(args.plot).absolute().parent.is_dir():
        raise QuireError(f"--plot {args.plot}: there is no such folder")
    for name, (low, high) in {"--prompt-tokens": args.prompt_tokens, "--output-tokens": args.output_tokens}.items():
        if not 1 <= low <= high:
            raise QuireError(f"{name} wants two numbers from 1 on, the smaller one first, not {low} {high}")
    if min(args.requests, args.group, args.repeats) < 1 or not all(0.0 < share <= 1.0 for share in args.shares):
        raise QuireError("--requests, --group and --repeats must be at least 1, and --shares above 0 and at most 1")
