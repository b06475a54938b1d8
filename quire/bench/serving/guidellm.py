"""`quire bench serve` checked against guidellm: both send the same requests to one server, figures side by side.

    python -m quire.bench.serving.guidellm --guidellm PATH

guidellm wants an environment of its own; PATH is its command. Each case starts a server, warms it, and lets the tools
take turns. Both read one trace: the same lengths, and in the open cases the same times of arrival. The server's own
record of its requests (/metrics) is the referee: where the server itself was slower under one tool, the load differed
and not the measuring.

So that neither tool disturbs the server, server and tools get cores of their own, and guidellm one process: of its
usual one per stream, all on the tool's core, each waits for the others and times its tokens late. For arrivals at given
times it makes a task for each of 10,240 possible requests, which delays the first by half a second: it gets fewer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.serving.served import serve_process
from quire.child import child_environment, module_command
from quire.errors import QuireError
from quire.machine import describe_machine

BOUND = 0.10
"""How far two figures may be apart."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure under both tools' names, and under the server's where it keeps it."""

    title: str
    ours: str
    theirs: tuple[str, str, float]
    """guidellm's metric, which of its statistics, and what one of its units is in ours."""
    server: str | None = None
    """Histogram of /metrics, in seconds."""


FIGURES = (
    Figure("requests/s", "request_throughput", ("requests_per_second", "mean", 1.0)),
    Figure("output tokens/s", "output_throughput", ("output_tokens_per_second", "mean", 1.0)),
    Figure("TTFT mean, ms", "mean_ttft_ms", ("time_to_first_token_ms", "mean", 1.0), "time_to_first_token_seconds"),
    Figure("TTFT median, ms", "median_ttft_ms", ("time_to_first_token_ms", "median", 1.0)),
    Figure("ITL mean, ms", "mean_itl_ms", ("inter_token_latency_ms", "mean", 1.0), "inter_token_latency_seconds"),
    Figure("TPOT mean, ms", "mean_tpot_ms", ("tpot", "mean", 1.0), "time_per_output_token_seconds"),
    Figure("TPOT median, ms", "median_tpot_ms", ("tpot", "median", 1.0)),
    Figure("end to end mean, ms", "mean_e2el_ms", ("request_latency", "mean", 1e3), "e2e_request_latency_seconds"),
    Figure("end to end median, ms", "median_e2el_ms", ("request_latency", "median", 1e3)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A server and a load: `rate` requests a second, or `streams` at a time."""

    server: Mapping[str, Any]
    requests: int
    prompt_tokens: int
    output_tokens: int
    rate: float | None = None
    streams: int | None = None

    @property
    def load(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate is not None else f"{self.streams} streams"


# Prompts take several steps of the dummy server: a request waits for the step under way, so that its time to the first
# token varies by up to a step with the moment of its arrival. That is chance in an open loop; in a closed one it is how
# long after an answer a tool sends its next request (ours 1 ms, guidellm 5 to 10).
_DUMMY = {"executor": "dummy", "dummy_step_ms": 20, "max_num_batched_tokens": 128}
CASES = {
    "dummy-open": Case(_DUMMY, 48, 512, 64, rate=4.0),
    "dummy-closed": Case(_DUMMY, 56, 512, 64, streams=8),
    "model-open": Case({}, 20, 64, 20, rate=1.25),
    "model-closed": Case({}, 48, 96, 24, streams=4),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of one tool: its figures and the server's, by title; and the processor time it took."""

    figures: dict[str, float]
    server: dict[str, float]
    cpu_seconds: float


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", default="guidellm", metavar="PATH", help="its command (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="what the server serves (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="NAME",
                        help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--repeat", type=int, default=2, metavar="N",
                        help="runs of each tool and case, whose median counts (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object per figure, not tables")
    args = parser.parse_args(words)
    machine = {**describe_machine(), "load_average": os.getloadavg()[0]}
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(args.model, folder)
        for case in args.cases:
            rows = found[case] = compare(*measure(args, CASES[case], folder))
            print(as_lines(case, rows, machine) if args.json else as_table(case, CASES[case], rows, args.repeat),
                  flush=True)
    told, passed = verdict(found)
    print(told, file=sys.stderr, flush=True)
    return 0 if passed else 1


def verdict(found: Mapping[str, list[dict[str, Any]]]) -> tuple[str, bool]:
    """Are all figures of all cases within the bound, and how far are the tools apart beside the server's own record?"""
    rows = [row | {"case": case} for case, those in found.items() for row in those]
    failed = [f"{row['case']} {row['figure']}" for row in rows if not row["within"]]
    apart = max((row["measured_apart"] for row in rows if "measured_apart" in row), key=lambda share: abs(share - 1))
    first = (f"FAIL: {len(failed)} of {len(rows)} figures are over {BOUND:.0%} ({'; '.join(failed)})" if failed
             else f"PASS: all {len(rows)} figures within {BOUND:.0%}")
    return (f"{first}\nBeside what the server itself recorded in each run, the tools measured at most "
            f"{abs(apart - 1):.1%} apart."), not failed


def measure(args: argparse.Namespace, case: Case, folder: Path) -> tuple[list[Turn], list[Turn]]:
    """Our runs and guidellm's, in turn, with the order changed from round to round."""
    trace = folder / "trace.jsonl"
    write_trace(trace, case)
    servers, tools = split_cores()
    options = {"model": args.model, "num_threads": len(servers), "enable_prefix_caching": False, **case.server}
    found: dict[str, list[Turn]] = {"quire": [], "guidellm": []}
    with contextlib.ExitStack() as stack:
        with _on(servers):
            url = stack.enter_context(serve_process(options))
        with _on(tools):
            _quire(url, trace, warm_up(case))  # what the first requests cost a server is nobody's figure
            for turn in range(args.repeat):
                for tool in ("guidellm", "quire") if turn % 2 else ("quire", "guidellm"):
                    before, began = scrape(url), _children_seconds()
                    figures = (_quire(url, trace, case) if tool == "quire"
                               else _guidellm(args.guidellm, url, trace, case, folder))
                    found[tool].append(Turn(figures, referee(before, scrape(url)), _children_seconds() - began))
    return found["quire"], found["guidellm"]


def compare(ours: Sequence[Turn], theirs: Sequence[Turn]) -> list[dict[str, Any]]:
    """A row per figure: medians of both tools, their ratio, the server's, and what the tools measured apart."""
    rows = []
    for figure in FIGURES:
        quire, guidellm = (statistics.median(turn.figures[figure.title] for turn in turns) for turns in (ours, theirs))
        row: dict[str, Any] = {"figure": figure.title, "quire": quire, "guidellm": guidellm, "ratio": quire / guidellm,
                               "within": abs(quire / guidellm - 1) <= BOUND}
        if figure.server is not None:
            under, beside = (statistics.median(turn.server[figure.title] for turn in turns) for turns in (ours, theirs))
            row |= {"server_under_quire": under, "server_under_guidellm": beside, "server_ratio": under / beside,
                    "measured_apart": quire / guidellm / (under / beside)}
        rows.append(row)
    cpu = [statistics.median(turn.cpu_seconds for turn in turns) for turns in (ours, theirs)]
    rows[0] |= {"quire_cpu_s": cpu[0], "guidellm_cpu_s": cpu[1]}
    return rows


def as_lines(case: str, rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    return "\n".join(json.dumps({"bench": "guidellm", "case": case, **machine, **{
        key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}}) for row in rows)


def as_table(name: str, case: Case, rows: list[dict[str, Any]], repeat: int) -> str:
    flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in case.server.items())
    lines = [f"{name}: quire serve {flags}".rstrip() + f"; {case.requests} requests of about {case.prompt_tokens} + "
             f"{case.output_tokens} tokens, {case.load}, medians of {repeat}",
             f"{'':24}{'quire':>10}{'guidellm':>10}{'ratio':>8}   the server's own: {'ratio':>6}  measured apart"]
    for row in rows:
        own = (f"{row['server_under_quire']:>12.2f}{row['server_under_guidellm']:>10.2f}{row['server_ratio']:>8.3f}"
               f"{row['measured_apart']:>10.3f}" if "server_ratio" in row else "")
        lines.append(f"{row['figure']:24}{row['quire']:>10.2f}{row['guidellm']:>10.2f}{row['ratio']:>8.3f}"
                     f"{'' if row['within'] else ' OVER':5}{own}".rstrip())
    lines.append(f"{'processor seconds':24}{rows[0]['quire_cpu_s']:>10.1f}{rows[0]['guidellm_cpu_s']:>10.1f}")
    return "\n".join([*lines, ""])


# ---- the same requests for both


def write_trace(path: Path, case: Case, seed: int = 7) -> None:
    """Requests in Mooncake's format, which both tools read: lengths spread by a quarter, arrivals at random.

    Lengths differ so that streams do not run in step: where they do, who sends a millisecond sooner is first all along.
    """
    rng = random.Random(seed)
    # Uniform over a given time, which is what Poisson arrivals are once their number is given.
    seconds = (case.requests - 1) / (case.rate or 1.0)
    times = sorted([0.0, *(rng.uniform(0, seconds) for _ in range(case.requests - 2)), seconds])
    lines = []
    for number, at in enumerate(times):
        length, output = (rng.randint(round(tokens * 0.75), round(tokens * 1.25))
                          for tokens in (case.prompt_tokens, case.output_tokens))
        blocks = [2 * number, 2 * number + 1][: -(-length // 512)]
        lines.append(json.dumps({"timestamp": round(1e3 * at, 3), "input_length": length, "output_length": output,
                                 "hash_ids": blocks}))
    path.write_text("\n".join(lines) + "\n")


def warm_up(case: Case) -> Case:
    """A few requests of the case, all at once."""
    return Case(case.server, 8, case.prompt_tokens, case.output_tokens, streams=8)


def save_tokenizer(model: str, folder: Path) -> None:
    """The model's tokenizer as a folder that transformers reads, which guidellm makes its prompts with."""
    from quire.models.loader.source import resolve_model

    resolve_model(model, load_format="dummy").tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def split_cores() -> tuple[set[int], set[int]]:
    """Half of the cores for the server, the rest for the tools; all for both where there is only one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    half = len(cores) // 2
    return (set(cores[:half]), set(cores[half:])) if half else (set(cores), set(cores))


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """What is started inside runs on these cores."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- the tools and the referee


def _quire(url: str, trace: Path, case: Case) -> dict[str, float]:
    load = [] if case.rate is not None else ["--max-concurrency", str(case.streams), "--trace-speed", "1e9"]
    done = _run(module_command("quire", "bench", "serve", "--url", url, "--backend", "openai-chat", "--json",
                               "--dataset-name", "trace", "--dataset-path", str(trace), "--num-prompts",
                               str(case.requests), "--ignore-eos", "--num-warmups", "0", *load),
                env=child_environment())
    found = json.loads(done)
    if found["completed"] != case.requests:
        raise QuireError(f"only {found['completed']} of {case.requests} requests were answered: {found['errors']}")
    return {figure.title: float(found[figure.ours]) for figure in FIGURES}


def _guidellm(command: str, url: str, trace: Path, case: Case, folder: Path) -> dict[str, float]:
    path = folder / "report.json"
    profile = "kind=replay,schedule_turn=timestamp" if case.rate is not None \
        else f"kind=concurrent,streams={case.streams}"
    _run([command, "run", "--backend", f"kind=openai_http,target={url},extras.body.temperature=0", "--profile", profile,
          "--constraint", f"kind=max_requests,count={case.requests}", "--tokenizer", f"kind=hf_auto,model={folder}",
          "--data", f"kind=mooncake,source.kind=json_file,source.path={trace},time_scale=0.001",
          "--output", f"kind=json,path={path}", "--disable-console"],
         cwd=folder, env={**os.environ, "PYTHONPATH": "", "GUIDELLM__MAX_WORKER_PROCESSES": "1",
                          "GUIDELLM__MAX_CONCURRENCY": str(case.requests)})
    report = json.loads(path.read_text())["benchmarks"][0]
    # Its own mean weighs every request by its tokens, which is our ITL; of requests alike it tells no mean.
    gaps = [request["inter_token_latency_ms"] for request in report["requests"]["successful"]]
    metrics = report["metrics"] | {"tpot": {"successful": {"mean": statistics.fmean(gaps),
                                                           "median": statistics.median(gaps)}}}
    done = metrics["request_totals"]["successful"]
    if done < case.requests - 1:  # in an open loop it now and then ends before it has counted its last answer
        raise QuireError(f"guidellm saw {done} of {case.requests} requests answered")
    return {figure.title: metrics[metric]["successful"][statistic] * unit
            for figure in FIGURES for metric, statistic, unit in [figure.theirs]}


def _run(words: list[str], **options: Any) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    except OSError as error:
        raise QuireError(f"cannot run {words[0]}: {error.strerror}; --guidellm takes the path of guidellm's command, "
                         "as `pip install guidellm` puts it into an environment of its own") from error
    if done.returncode:
        raise QuireError(f"{words[0]} failed with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def _children_seconds() -> float:
    """Processor time of all processes that were started here and have ended: the server is not among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def scrape(url: str) -> dict[str, float]:
    """Sums and counts of the server's histograms."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^quire:(\w+_(?:sum|count))(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def referee(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Means of what the server recorded between two looks, in milliseconds, by the figure's title."""
    return {figure.title: 1e3 * (after[f"{figure.server}_sum"] - before[f"{figure.server}_sum"])
            / (after[f"{figure.server}_count"] - before[f"{figure.server}_count"])
            for figure in FIGURES if figure.server is not None}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuireError as problem:
        sys.exit(f"error: {problem}")
