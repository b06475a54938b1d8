"""Plays random workloads through the whole engine and through the plain path, and compares them bit by bit.

Requests come and go, share prefixes, and fight over tiny KV pools. The first difference in tokens or
log-probabilities is shrunk to a small case and printed with the command that replays it (exit code 1)."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.options import integer, number, read_text
from quire.cli.terminal import DIM, styled
from quire.fuzz.case import FuzzCase, random_case

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = (
    "examples:\n"
    "  quire fuzz                      for a minute, cases that nobody has tried\n"
    "  quire fuzz --seed 1 --cases 50  the same cases every time\n"
    "  quire fuzz --replay case.json"
)
_SHRINK_TRIES = 200
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
        "--seed",
        type=integer,
        metavar="N",
        help="seed of the first case, the next one has the next (default: a random one)",
    )
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="print a failing case as it is"
    )


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as folder:
        player = _player(Path(folder))
        if args.replay is not None:
            return _replay(_read_case(args.replay), player)
        return _search(args, player)


def _player(folder: Path) -> Callable[[FuzzCase], str | None]:
    """Plays a case in a folder of its own."""

    def play(case: FuzzCase) -> str | None:
        from quire.fuzz.run import find_difference

        return find_difference(case, folder)

    return play


def _read_case(text: str) -> FuzzCase:
    return FuzzCase.from_json(text if text.lstrip().startswith("{") else read_text(text))


def _replay(case: FuzzCase, play: Callable[[FuzzCase], str | None]) -> int:
    difference = play(case)
    print("no difference: the case passes" if difference is None else f"FAILED: {difference}")
    return 0 if difference is None else 1


def _search(args: argparse.Namespace, play: Callable[[FuzzCase], str | None]) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    first, start, reported = seed, time.monotonic(), 0.0
    while True:
        elapsed = time.monotonic() - start
        if (elapsed >= args.seconds) if args.cases is None else (seed - first >= args.cases):
            break
        if elapsed - reported >= (0.2 if sys.stderr.isatty() else _REPORT_SECONDS):
            reported = elapsed
            _progress(seed - first, elapsed)
        case = random_case(seed)
        difference = play(case)
        if difference is not None:
            _progress_end()
            _report(seed, case, difference, args.shrink, play)
            return 1
        seed += 1
    _progress_end()
    print(f"{seed - first} cases in {time.monotonic() - start:.0f} s, no difference (seeds from {first})")
    return 0


def _report(
    seed: int, case: FuzzCase, difference: str, shrinking: bool, play: Callable[[FuzzCase], str | None]
) -> None:
    """Say what failed, then make it small; Ctrl-C ends that, and prints the case as far as it got."""
    print(f"FAILED: case {seed}: {difference}", flush=True)
    if shrinking:
        from quire.fuzz.shrink import shrink

        print(styled("shrinking it …", DIM, sys.stderr), file=sys.stderr, flush=True)
        smallest = [case]

        def fails(candidate: FuzzCase) -> bool:
            if play(candidate) is None:
                return False
            smallest[0] = candidate
            return True

        try:
            shrink(case, fails, _SHRINK_TRIES)
        except KeyboardInterrupt:
            pass
        case = smallest[0]
        print(f"the smallest case found: {play(case)}")
    print(case.to_json())
    print(f"\nreplay it with:\n  quire fuzz --replay {shlex.quote(case.to_json())}")
    print(f"or all of it with:\n  quire fuzz --seed {seed} --cases 1")


def _progress(cases: int, elapsed: float) -> None:
    line = f"{cases} cases in {elapsed:.0f} s, no difference"
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{styled(line, DIM, sys.stderr)}", end="", file=sys.stderr, flush=True)
    elif cases:
        print(line, file=sys.stderr, flush=True)


def _progress_end() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
