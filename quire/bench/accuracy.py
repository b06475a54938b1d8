"""`quire bench accuracy`: on a CPU `quire.bench.cpu.accuracy`; `--device cuda`: formats of a GPU against bf16."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from quire.bench.checkpoints.names import LAYOUT_NAMES
from quire.bench.cpu import accuracy
from quire.bench.gpu import format_accuracy
from quire.errors import QuireError

EXAMPLES = accuracy.EXAMPLES + "\n  quire bench accuracy --device cuda --files all --tasks lambada --table"
add_arguments = accuracy.add_arguments


def run(args: argparse.Namespace) -> int:
    gpu = args.device == "cuda"
    if args.limit < 0 or args.kl_texts < 0:
        raise QuireError("--limit and --kl-texts are 0 or more")
    if gpu and (args.keep is not None or args.num_threads is not None):
        raise QuireError("--keep and --num-threads are for a CPU")
    if args.keep is not None:
        try:
            Path(args.keep).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuireError(f"--keep: there can be no folder {args.keep}: {error.strerror}") from None
    files = LAYOUT_NAMES if "all" in args.files else tuple(args.files)
    asked = accuracy.Asked(args.model, tuple(args.tasks), args.limit or None, args.num_threads, args.keep, files)
    every, reference = ((format_accuracy.FORMATS, format_accuracy.REFERENCE) if gpu
                        else (accuracy.FORMATS, accuracy.REFERENCE))
    formats = args.formats or ([] if files else [name for name in every if name != reference])
    lines = (format_accuracy if gpu else accuracy).measure(asked, formats, args.kl_texts)
    for line in table(lines, asked.tasks) if args.table else map(written, lines):
        print(line, flush=True)
    return 0


def written(line: dict[str, Any]) -> str:
    """In JSON, which has no infinite numbers: the error of one answer, or of one passage, is not known."""
    return json.dumps({name: None if value == math.inf else value for name, value in line.items()})


def table(lines: Iterable[dict[str, Any]], tasks: Sequence[str]) -> Iterator[str]:
    """A row for each format as soon as it is measured, in the syntax of the documentation."""
    head = ["format", *tasks, "KL", "the likeliest token the same", "MiB of weights"]
    for cells in (head, ["---"] * len(head)):
        yield _row(cells)
    for name, some in groupby(lines, key=lambda line: line["format"]):
        of = {line["task"]: line for line in some}
        kl, size = of.get("kl"), next(iter(of.values())).get("weight_bytes")
        yield _row([f"`{name}`", *(_points(of[task]) if task in of else "" for task in tasks),
                    f"{kl['kl']:.2g} ± {kl['kl_error']:.1g}" if kl else "",
                    f"{100 * kl['same_likeliest']:.1f}%" if kl else "", f"{size / 2**20:.0f}" if size else ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _points(line: dict[str, Any]) -> str:
    if "points" not in line:  # the reference
        return f"{100 * line.get('acc_norm', line['acc']):.1f}% of {line['questions']:,}"
    return f"{line['points']:+.1f} ± {line['points_error']:.2f}"
