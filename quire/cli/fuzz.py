"""Plays random workloads through the whole engine and through the plain path, and compares them bit by bit.

Requests come and go, share prefixes, and fight over tiny KV pools. Cases run on tiny models; ten times as many run
on KV that is numbers, where steps are lost and transfers between tiers fail or come late, and some on several engines
that compute prompts for one another over a network that fails. The first difference in
tokens or log-probabilities is shrunk to a small case and printed with the command that replays it (exit code 1)."""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.options import integer, number, read_text
from quire.cli.terminal import DIM, styled
from quire.fuzz.case import FuzzCase, random_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ON_RANKS = 6
"""One in so many cases with several engines has engines of several ranks."""
EXAMPLES = (
    "examples:\n"
    "  quire fuzz                      for a minute, cases that nobody has tried\n"
    "  quire fuzz --seed 1 --cases 50  the same cases every time\n"
    "  quire fuzz --replay case.json"
)
_SHRINK_TRIES = 200
MODELS, FAULTS, PAIRS = "models", "faults", "pairs"
_REPORT_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds", type=number, default=60.0, metavar="S", help="how long to go on (default: %(default)s)"
    )
    length.add_argument("--cases", type=integer, metavar="N", help="how many cases to play")
    length.add_argument(
        "--replay", metavar="CASE", help="play one case: a file with its JSON, or the JSON itself"
    )
    parser.add_argument(
        "--kind", choices=("all", MODELS, FAULTS, PAIRS), default="all",
        help=f"{MODELS}: on tiny models; {FAULTS}: on KV that is numbers, with lost steps and failing transfers; "
             f"{PAIRS}: the same with prompts that other engines compute (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=integer,
        metavar="N",
        help="seed of the first case, the next one has the next (default: a random one)",
    )
    parser.add_argument(
        "--ranks", type=_sizes, metavar="TxP",
        help="on so many tensor ranks and stages, as in 2x2: threads of this process")
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="print a failing case as it is"
    )


def _sizes(text: str) -> tuple[int, int]:
    tensor, cross, stages = text.partition("x")
    if not cross or not tensor.isdigit() or not stages.isdigit() or not int(tensor) * int(stages):
        raise argparse.ArgumentTypeError(f"must be two numbers such as 2x1, not {text!r}")
    return int(tensor), int(stages)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of cases: how they are made, played and made smaller."""

    name: str
    make: Callable[[int], Any]
    play: Callable[[Any], str | None]
    simpler: Callable[[Any], Iterator[Any]]
    each: int
    """Cases for each seed of a run."""


def run(args: argparse.Namespace) -> int:
    peers = logging.getLogger("quire.peers")
    before = peers.level
    peers.setLevel(logging.ERROR)  # prompts that do not come are what cases are made of
    try:
        return _run(args)
    finally:
        peers.setLevel(before)


def _run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as folder:
        kinds = _kinds(Path(folder), args.ranks)
        if args.replay is not None:
            return _replay(args.replay, kinds)
        return _search(args, [kind for kind in kinds if args.kind in ("all", kind.name)])


def _kinds(folder: Path, ranks: tuple[int, int] | None = None) -> list[_Kind]:
    from quire.fuzz.case import model_on_ranks
    from quire.fuzz.fault_case import on_ranks, random_fault_case
    from quire.fuzz.fault_run import find_fault
    from quire.fuzz.fault_shrink import simpler_fault_cases
    from quire.fuzz.pair_case import PairCase, pair_on_ranks, random_pair_case
    from quire.fuzz.pair_run import find_pair_fault
    from quire.fuzz.pair_shrink import simpler_pair_cases
    from quire.fuzz.shrink import simpler_cases

    def play(case: FuzzCase) -> str | None:
        from quire.fuzz.run import find_difference

        return find_difference(case, folder)

    def pair(seed: int) -> PairCase:
        """On ranks now and then: they are threads, and take their time."""
        case = random_pair_case(seed)
        return case if ranks is None and seed % _ON_RANKS else pair_on_ranks(case, seed, ranks)

    pairs = _Kind(PAIRS, pair, find_pair_fault, simpler_pair_cases, 3)
    if ranks is not None:
        return [_Kind(MODELS, lambda seed: model_on_ranks(random_case(seed), *ranks), play, simpler_cases, 1),
                _Kind(FAULTS, lambda seed: on_ranks(random_fault_case(seed), *ranks), find_fault, simpler_fault_cases,
                      10), pairs]
    return [_Kind(MODELS, random_case, play, simpler_cases, 1),
            _Kind(FAULTS, random_fault_case, find_fault, simpler_fault_cases, 10),
            pairs]


def _replay(given: str, kinds: list[_Kind]) -> int:
    text = given if given.lstrip().startswith("{") else read_text(given)
    case, kind = _read_case(text, kinds)
    difference = kind.play(case)
    print("no difference: the case passes" if difference is None else f"FAILED: {difference}")
    return 0 if difference is None else 1


def _read_case(text: str, kinds: list[_Kind]) -> tuple[Any, _Kind]:
    from quire.fuzz.fault_case import KIND, FaultCase
    from quire.fuzz.pair_case import PAIR_KIND, PairCase

    models, faults, pairs = kinds
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if isinstance(data, dict) and data.get("kind") == KIND:
        return FaultCase.from_data(data), faults
    if isinstance(data, dict) and data.get("kind") == PAIR_KIND:
        return PairCase.from_data(data), pairs
    return FuzzCase.from_json(text), models


def _search(args: argparse.Namespace, kinds: list[_Kind]) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    first, start, reported, played = seed, time.monotonic(), 0.0, 0
    while True:
        elapsed = time.monotonic() - start
        if (elapsed >= args.seconds) if args.cases is None else (seed - first >= args.cases):
            break
        if elapsed - reported >= (0.2 if sys.stderr.isatty() else _REPORT_SECONDS):
            reported = elapsed
            _progress(played, elapsed)
        for kind in kinds:
            each = kind.each if len(kinds) > 1 else 1
            for one in range(seed * each, (seed + 1) * each):
                case = kind.make(one)
                difference = kind.play(case)
                if difference is not None:
                    _progress_end()
                    again = "" if args.ranks is None else " --ranks {}x{}".format(*args.ranks)
                    _report(one, case, difference, args.shrink, kind, again)
                    return 1
                played += 1
        seed += 1
    _progress_end()
    print(f"{played} cases in {time.monotonic() - start:.0f} s, no difference (seeds from {first})")
    return 0


def _report(seed: int, case: Any, difference: str, shrinking: bool, kind: _Kind, again: str) -> None:
    """Say what failed, then make it small; Ctrl-C ends that, and prints the case as far as it got."""
    print(f"FAILED: case {seed} ({kind.name}): {difference}", flush=True)
    if shrinking:
        from quire.fuzz.shrink import shrink

        print(styled("shrinking it …", DIM, sys.stderr), file=sys.stderr, flush=True)
        smallest = [case]

        def fails(candidate: Any) -> bool:
            if kind.play(candidate) is None:
                return False
            smallest[0] = candidate
            return True

        try:
            shrink(case, fails, kind.simpler, _SHRINK_TRIES * kind.each)
        except KeyboardInterrupt:
            pass
        case = smallest[0]
        print(f"the smallest case found: {kind.play(case)}")
    print(case.to_json())
    print(f"\nreplay it with:\n  quire fuzz --replay {shlex.quote(case.to_json())}")
    print(f"or all of it with:\n  quire fuzz --kind {kind.name} --seed {seed} --cases 1{again}")


def _progress(cases: int, elapsed: float) -> None:
    line = f"{cases} cases in {elapsed:.0f} s, no difference"
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{styled(line, DIM, sys.stderr)}", end="", file=sys.stderr, flush=True)
    elif cases:
        print(line, file=sys.stderr, flush=True)


def _progress_end() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
