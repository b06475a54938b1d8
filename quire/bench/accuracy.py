"""`quire bench accuracy`: on a CPU `quire.bench.cpu.accuracy`; `--device cuda`: formats of a GPU against bf16."""

from __future__ import annotations

import argparse
import json

from quire.bench.cpu import accuracy
from quire.bench.gpu import format_accuracy
from quire.errors import QuireError

EXAMPLES = accuracy.EXAMPLES + "\n  quire bench accuracy --device cuda --formats fp8 int4 --tasks lambada"
add_arguments = accuracy.add_arguments


def run(args: argparse.Namespace) -> int:
    if args.device == "cpu":
        return accuracy.run(args)
    if args.keep is not None or args.num_threads is not None or args.limit < 0 or args.kl_texts < 0:
        raise QuireError("--keep and --num-threads are for a CPU; --limit and --kl-texts are 0 or more")
    asked = accuracy.Asked(args.model, tuple(args.tasks), args.limit or None, None)
    for line in format_accuracy.measure(asked, args.formats or list(format_accuracy.FORMATS), args.kl_texts):
        print(json.dumps(line), flush=True)
    return 0
