"""`quire bench parallel`: What it costs to reach ranks, and how fast one model is over several of them.

The first part has no model: from handing in a plan of decoding sequences to the moment at which the last rank begins
with it. The second runs cases of `bench cpu` in one process and over ranks, in turns, on the same cores, and says what
else had these cores meanwhile."""

from __future__ import annotations

import argparse
import json
import re

from quire.bench.cpu.cases import CASES
from quire.bench.ranks.control_plane import control_plane, ray_against_socket
from quire.bench.ranks.exchange import exchange_times
from quire.bench.ranks.figures import figures
from quire.bench.ranks.layer_times import layer_times
from quire.bench.ranks.rank_memory import rank_memory
from quire.bench.ranks.speeds import speeds
from quire.cli.options import integer
from quire.machine import describe_machine

EXAMPLES = ("examples:\n  quire bench parallel --figures\n  quire bench parallel --cases\n"
            "  quire bench parallel --ranks --cases A B C --sizes 2x1 1x2\n"
            "  quire bench parallel --ranks --model ./qwen3-0.6b --load-format dummy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", action="store_true",
                        help="instead of all else: what is asked of two ranks, each figure with its limit")
    parser.add_argument("--ranks", type=integer, nargs="*", default=[1, 2, 4, 8], metavar="N",
                        help="numbers of ranks to reach (default: 1 2 4 8; none: leave that part out)")
    parser.add_argument("--sequences", type=integer, default=256, metavar="N",
                        help="that decode in each of those plans (default: %(default)s)")
    parser.add_argument("--steps", type=integer, default=400, metavar="N", help="plans (default: %(default)s)")
    parser.add_argument("--ray", action="store_true",
                        help="also: a plan to another node through our socket, against a call of a Ray actor")
    parser.add_argument("--cases", nargs="*", default=["A", "B", "C"], choices=CASES,
                        help="cases of `bench cpu` (default: A B C; none: leave that part out)")
    parser.add_argument("--sizes", nargs="+", type=_size, default=["2x1", "1x2"], metavar="TxP",
                        help="tensor ranks x stages to compare with one process, 1x1, which always runs "
                             "(default: 2x1 1x2)")
    parser.add_argument("--memory", nargs="+", type=_size, default=[], metavar="TxP",
                        help="also measure what each rank of such a size takes at most while it loads")
    parser.add_argument("--layer-times", type=integer, nargs="+", default=[], metavar="ROWS",
                        help="also measure what layers and head take in steps of so many sequences")
    parser.add_argument("--model", default="smollm2-135m", help="model of the cases (default: %(default)s)")
    parser.add_argument("--load-format", default="auto", help="dummy: the model's shapes with random weights")
    parser.add_argument("--repeat", type=integer, default=3, metavar="N",
                        help="rounds, in each of which every size has its turn; the median of their ratios counts "
                             "(default: %(default)s)")


def _size(word: str) -> str:
    if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", word):
        raise argparse.ArgumentTypeError(f"{word!r} is not a size: tensor ranks x stages, as in 2x1")
    return word


def run(args: argparse.Namespace) -> int:
    machine = describe_machine()
    if args.figures:
        for line in figures():
            print(json.dumps({**line, **machine}), flush=True)
        return 0
    for count in args.ranks:
        print(json.dumps({**control_plane(count, args.sequences, args.steps), **machine}), flush=True)
        if count > 1:
            print(json.dumps({**exchange_times(count), **machine}), flush=True)
    if args.ray:
        for sequences in (1, args.sequences):
            print(json.dumps({**ray_against_socket(sequences, args.steps), **machine}), flush=True)
    for size in args.memory:
        tensor, stages = map(int, size.split("x"))
        for line in rank_memory(args.model, tensor, stages, args.load_format):
            print(json.dumps({**line, **machine}), flush=True)
    for rows in args.layer_times:
        print(json.dumps({**layer_times(args.model, args.load_format, rows), **machine}), flush=True)
    for case in args.cases:
        for line in speeds(case, args.model, args.load_format, args.sizes, args.repeat):
            print(json.dumps({**line, **machine}), flush=True)
    return 0
