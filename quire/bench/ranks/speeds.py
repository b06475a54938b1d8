"""Cases of `bench cpu` in one process and over ranks, in turns on the same cores."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from quire.bench.cpu.case_process import CaseProcess
from quire.bench.processor_time import ProcessorWatch, Taken
from quire.machine import usable_cores

ONE_PROCESS = "1x1"


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    taken: Taken


def speeds(case: str, model: str, load_format: str, sizes: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """One process with a thread for every core, and each of `sizes` with the cores dealt to its ranks: so many rounds,
    in each of which every one runs once. A line for every run, then one for every size.

    All stay loaded and sleep while another runs: a machine whose speed changes slows neighbours alike, and what counts
    is the ratio of a round."""
    common = {"load_format": load_format, "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    runs: dict[str, list[Run]] = {size: [] for size in [ONE_PROCESS, *sizes]}
    with ExitStack() as stack:
        engines = {size: stack.enter_context(CaseProcess("quire", case, model, {**common, **options_of(size)}))
                   for size in runs}
        for number in range(1, rounds + 1):
            for size, engine in engines.items():
                done = watched_run(engine)
                runs[size].append(done)
                yield {"bench": "parallel", "case": case, "model": model, "size": size, "round": number,
                       **described(done)}
        ends = {size: engine.finish() for size, engine in engines.items()}
    for size, mine in runs.items():
        yield {"bench": "parallel", "case": case, "model": model, "size": size,
               **compared(mine, runs[ONE_PROCESS]), "kv_pool_bytes": ends[size]["kv_pool_bytes"],
               "preemptions": ends[size]["preemptions"],
               "same_tokens": ends[size]["tokens"] == ends[ONE_PROCESS]["tokens"]}


def options_of(size: str) -> dict[str, Any]:
    """Of an engine with so many tensor ranks x stages."""
    if size == ONE_PROCESS:
        return {"num_threads": usable_cores()}
    tensor, stages = map(int, size.split("x"))
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}


def watched_run(engine: CaseProcess) -> Run:
    watch = ProcessorWatch(engine.pid)
    before = watch.read()
    seconds = engine.run()
    return Run(seconds, watch.taken(before, watch.read()))


def described(run: Run) -> dict[str, Any]:
    """A run, with the shares of the processor time that others had meanwhile."""
    return {"seconds": round(run.seconds, 3), "others": round(run.taken.others, 4),
            "stolen": round(run.taken.stolen, 4), "disturbed": run.taken.disturbed}


def compared(runs: Sequence[Run], one_process: Sequence[Run]) -> dict[str, Any]:
    """The median of the rounds' ratios. Rounds in which others took processor time from one of both do not count,
    unless all are such: `undisturbed_rounds` says how many did."""
    pairs = list(zip(one_process, runs, strict=True))
    ratios = [one.seconds / run.seconds for one, run in pairs]
    undisturbed = [ratio for ratio, (one, run) in zip(ratios, pairs, strict=True)
                   if not one.taken.disturbed and not run.taken.disturbed]
    return {"seconds": [round(run.seconds, 3) for run in runs], "ratios": [round(ratio, 3) for ratio in ratios],
            "undisturbed_rounds": len(undisturbed),
            "speed_to_one_process": round(statistics.median(undisturbed or ratios), 3)}
