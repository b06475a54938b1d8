"""`quire bench cpu`: cases A to D on a CPU, Quire and transformers in one run, with ratio and share of the limit."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from typing import Any

from quire.bench.cpu.cases import CASES, Workload, workload
from quire.child import child_environment, module_command
from quire.errors import QuireError
from quire.machine import Ceilings, describe_machine, measure_ceilings

_UNITS = {"A": "output tok/s", "B": "output tok/s", "C": "prompt tok/s", "D": "seconds"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="model to measure (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="which cases (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine per case; the median counts")
    parser.add_argument("--slices", action="store_true",
                        help="instead of the cases: what summing in slices costs the GEMMs of a layer")
    parser.add_argument("--sampling", action="store_true",
                        help="instead of the cases: what sampling takes of a step of Qwen3-0.6B's shapes, 32 sequences")
    parser.add_argument("--python", action="store_true",
                        help="instead of the cases: what Python costs one stream, per token, outside the kernels")
    parser.add_argument("--threads", nargs="+", type=int, metavar="N",
                        help="instead of the rival: the cases with these numbers of threads, and how they scale")
    parser.add_argument("--no-rival", action="store_true", help="measure Quire alone, without transformers")


def run(args: argparse.Namespace) -> int:
    machine = describe_machine()
    if args.slices:
        return _slices(args.model, machine)
    if args.sampling:
        from quire.bench.cpu import sampling as cpu_sampling
        from quire.bench.gpu.cases import MODELS

        for line in cpu_sampling.measure(MODELS["0.6b"], repeat=args.repeat):
            _print({**line, **machine})
        return 0
    if args.python:
        return _python(args.model, args.repeat, machine)
    if args.threads:
        return _scaling(args, machine)
    shape = _shape(args.model)
    ceilings = measure_ceilings()
    _print({"bench": "cpu", "case": "ceilings", **machine, "read_GB_s": round(ceilings.read_bytes_per_s / 1e9, 1),
            "gemm_GFLOP_s": round(ceilings.flops_per_s / 1e9, 1)})
    for case in args.cases:
        _print({**_case(case, args, shape, ceilings), **machine})
    _print({**_cold_start(args.model), **machine})
    return 0


def _slices(model: str, machine: dict[str, Any]) -> int:
    from quire.bench.cpu.slices import slice_costs
    from quire.models.loader.source import resolve_model
    from quire.models.registry import read_spec

    spec = read_spec(resolve_model(model).config)
    for line in slice_costs(spec.layers[0], spec.hidden_size):
        _print({"bench": "cpu", "case": "slices", "model": model, **line, **machine})
    return 0


def _python(model: str, repeat: int, machine: dict[str, Any]) -> int:
    for temperature in ("0.0", "0.8"):
        found = _child("quire.bench.cpu.python", model, str(repeat), temperature)
        _print({"bench": "cpu", "case": "python", "model": model, **found, **machine})
    return 0


def _scaling(args: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Each case with each number of threads, in processes of their own; `speedup` is over the first number named."""
    shape = _shape(args.model)
    for case in args.cases:
        work = workload(case, shape["vocab_size"])
        first: float | None = None
        for threads in args.threads:
            found = contest("quire", case, args.model, args.repeat, {"num_threads": threads})
            seconds = statistics.median(found["seconds"])
            first = seconds if first is None else first
            _print({"bench": "cpu", "case": case, "model": args.model, "unit": _UNITS[case], "threads": threads,
                    "quire": _figure(case, work, seconds), "speedup": round(first / seconds, 2),
                    "quire_seconds": [round(s, 3) for s in found["seconds"]], **machine})
    return 0


def _case(case: str, args: argparse.Namespace, shape: dict[str, int], ceilings: Ceilings) -> dict[str, Any]:
    work = workload(case, shape["vocab_size"])
    mine = contest("quire", case, args.model, args.repeat)
    limit = limit_seconds(work, shape, ceilings)
    seconds = statistics.median(mine["seconds"])
    extra = mine["peak_bytes"] - shape["weight_bytes"] - mine["kv_pool_bytes"]
    line: dict[str, Any] = {
        "bench": "cpu", "case": case, "model": args.model, "unit": _UNITS[case], "dtype": "float32",
        "prompt_tokens": work.num_prompt_tokens, "output_tokens": work.num_output_tokens,
        "quire": _figure(case, work, seconds), "quire_seconds": [round(s, 3) for s in mine["seconds"]],
        "limit": _figure(case, work, limit), "share_of_limit": round(limit / seconds, 3),
        "first_token_ms": round(mine["first_token_seconds"] * 1e3, 1),
        "peak_MB": round(mine["peak_bytes"] / 1e6), "peak_over_weights_and_pool_MB": round(extra / 1e6),
    }
    if not args.no_rival:
        rival = contest("transformers", case, args.model, args.repeat)
        rival_seconds = statistics.median(rival["seconds"])
        line |= {"transformers": _figure(case, work, rival_seconds), "ratio": round(rival_seconds / seconds, 2),
                 "transformers_seconds": [round(s, 3) for s in rival["seconds"]],
                 "transformers_peak_MB": round(rival["peak_bytes"] / 1e6)}
    return line


def _figure(case: str, work: Workload, seconds: float) -> float:
    if case == "D":
        return round(seconds, 3)
    return round((work.num_prompt_tokens if case == "C" else work.num_output_tokens) / seconds, 2)


def limit_seconds(work: Workload, shape: dict[str, int], ceilings: Ceilings) -> float:
    """No engine of this model in fp32 can be faster: each distinct prompt token is computed once, each decode step
    reads every weight once with all requests in it and each sequence's KV once, at the measured ceilings."""
    per_token = 2 * shape["layer_parameters"]
    head = 2 * shape["head_parameters"]
    prompts = {tuple(p[: i + 1]) for p in work.prompts for i in range(15, len(p), 16)}
    distinct = 16 * len(prompts) + sum(len(p) % 16 for p in work.prompts)
    attention = sum(2 * len(p) ** 2 * shape["query_width"] * shape["layers"] for p in work.prompts[:1]) \
        if len(work.prompts) == 1 else 0
    prefill = (distinct * per_token + len(work.prompts) * head + attention) / ceilings.flops_per_s
    decoded = [n - 1 for n in work.outputs]
    steps = max(decoded)
    kv = sum((len(p) + n / 2) * n * shape["kv_bytes_per_token"] for p, n in zip(work.prompts, decoded, strict=True))
    read = (steps * shape["weight_bytes"] + kv) / ceilings.read_bytes_per_s
    compute = sum(decoded) * (per_token + head) / ceilings.flops_per_s
    return prefill + max(read, compute)


def _shape(model: str) -> dict[str, int]:
    from quire.models.loader.source import resolve_model
    from quire.models.registry import read_spec

    spec = read_spec(resolve_model(model).config)
    head = spec.vocab_size * spec.embed_dim
    table = 0 if spec.tied_head else head
    return {
        "vocab_size": spec.vocab_size, "layers": spec.num_layers,
        "weight_bytes": 4 * spec.num_parameters, "head_parameters": head,
        "layer_parameters": spec.num_parameters - head - table,
        "kv_bytes_per_token": spec.kv_bytes_per_token,
        "query_width": spec.layers[0].attention.num_heads * spec.layers[0].attention.head_dim,
    }


def contest(engine: str, case: str, model: str, repeat: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Seconds of each repetition and more of that kind, from a process of its own."""
    try:
        return _child("quire.bench.cpu.contestant", engine, case, model, str(repeat), json.dumps(options or {}))
    except QuireError as error:
        raise QuireError(f"case {case} failed on {engine}: {error}") from error


def _child(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a module prints in a process of its own."""
    done = subprocess.run(module_command(module, *arguments), capture_output=True, text=True, check=False,
                          env=child_environment())
    if done.returncode:
        raise QuireError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _cold_start(model: str) -> dict[str, Any]:
    """Process start to first token on the cached model."""
    command = module_command("quire.bench.first_token", model, "{}", json.dumps("The capital of France is"), "")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=child_environment())
        seconds.append(time.perf_counter() - start)
    return {"bench": "cpu", "case": "start", "model": model, "unit": "s from process start to first token and exit",
            "quire": round(statistics.median(seconds), 2), "runs": [round(s, 2) for s in seconds]}


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
