"""`quire bench cpu`: cases A to D on a CPU, Quire and its rivals in turns, with ratios and share of the limit."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from contextlib import ExitStack
from typing import Any

from quire.bench.cpu.case_process import CaseProcess, contest
from quire.bench.cpu.cases import CASES, RIVALS, Workload, workload
from quire.child import child_environment, module_command
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.machine import Ceilings, describe_machine, measure_ceilings, usable_cores

_UNITS = {"A": "output tok/s", "B": "output tok/s", "C": "prompt tok/s", "D": "seconds"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="model to measure (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="which cases (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each engine per case; the median counts")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--slices", action="store_true",
                         help="instead of the cases: what summing in slices costs the GEMMs of a layer")
    instead.add_argument("--sampling", action="store_true",
                         help="instead of the cases: what sampling takes of a step of 32 sequences of Qwen3-0.6B")
    instead.add_argument("--python", action="store_true",
                         help="instead of the cases: what Python costs one stream, per token, outside the kernels")
    instead.add_argument("--kernels", action="store_true",
                         help="instead of the cases: the GEMMs and the attention of a layer one by one, with their "
                              "rates and shares of the limit")
    parser.add_argument("--quantization", choices=("file", "int8", "int4"),
                        help="Quire multiplies integers, as its option of this name says (default: float32)")
    parser.add_argument("--threads", nargs="+", type=int, metavar="N",
                        help="instead of the rival: the cases with these numbers of threads, and how they scale; with "
                             "--kernels or --python: those")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=["transformers"],
                        help="engines to measure in turns with Quire (default: %(default)s); onnxruntime-genai and "
                             "llama.cpp compute in 4 bits and are installed from the package index")
    parser.add_argument("--no-rival", action="store_true", help="measure Quire alone")


def run(args: argparse.Namespace) -> int:
    _check(args)
    machine = describe_machine()
    if args.slices:
        return _slices(args.model, machine)
    if args.sampling:
        return _sampling(args.repeat, machine)
    if args.python:
        return _python(args, machine)
    if args.threads and not args.kernels:
        return _scaling(args, machine)
    shape = _shape(args.model, args.quantization)
    ceilings = measure_ceilings()
    if args.kernels:
        return _kernels(args, ceilings, machine)
    if not args.no_rival:
        from quire.bench.cpu.rivals import make_files

        for rival in args.rivals:
            make_files(rival, args.model)
    for case in args.cases:
        line, ceilings = _case(case, args, shape, ceilings)
        _print({**line, **machine})
    _print_ceilings(ceilings, machine)
    _print({**_cold_start(args.model, _options(args)), **machine})
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.repeat < 1:
        raise QuireError(f"--repeat must be at least 1, not {args.repeat}")
    for name in ("slices", "sampling"):
        if getattr(args, name) and (args.threads or args.quantization):
            raise QuireError(f"--{name} goes with neither --threads nor --quantization")
    for threads in args.threads or ():
        EngineConfig.create(num_threads=threads)


def _kernels(args: argparse.Namespace, ceilings: Ceilings, machine: dict[str, Any]) -> int:
    """Ceilings are measured before and after, and the higher ones count: a kernel's best time is of the machine's best
    moment too."""
    from quire.bench.cpu.kernels import measure

    found = {threads: list(measure(args.model, args.quantization, threads))
             for threads in args.threads or [usable_cores()]}
    ceilings = ceilings.or_higher(measure_ceilings())
    _print_ceilings(ceilings, machine)
    for threads, kernels in found.items():
        for kernel in kernels:
            _print({"bench": "cpu", "case": "kernels", "model": args.model, "threads": threads,
                    **kernel.against(ceilings), **machine})
    return 0


def _print_ceilings(ceilings: Ceilings, machine: dict[str, Any]) -> None:
    _print({"bench": "cpu", "case": "ceilings", **machine, "read_GB_s": round(ceilings.read_bytes_per_s / 1e9, 1),
            "gemm_GFLOP_s": round(ceilings.flops_per_s / 1e9, 1)})


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Of Quire's engine."""
    return {"dtype": "float32"} if args.quantization is None else {"quantization": args.quantization}


def _sampling(repeat: int, machine: dict[str, Any]) -> int:
    from quire.bench.cpu import sampling as cpu_sampling
    from quire.bench.gpu.cases import MODELS

    for line in cpu_sampling.measure(MODELS["0.6b"], repeat=repeat):
        _print({**line, **machine})
    return 0


def _slices(model: str, machine: dict[str, Any]) -> int:
    from quire.bench.cpu.slices import slice_costs
    from quire.models.loader.source import resolve_model
    from quire.models.registry import read_spec

    spec = read_spec(resolve_model(model).config)
    for line in slice_costs(spec.layers[0], spec.hidden_size):
        _print({"bench": "cpu", "case": "slices", "model": model, **line, **machine})
    return 0


def _python(args: argparse.Namespace, machine: dict[str, Any]) -> int:
    for threads in args.threads or [None]:
        options = _options(args) if threads is None else {**_options(args), "num_threads": threads}
        for temperature in ("0.0", "0.8"):
            found = _child("quire.bench.cpu.python", args.model, str(args.repeat), temperature, json.dumps(options))
            _print({"bench": "cpu", "case": "python", "model": args.model, **options, **found, **machine})
    return 0


def _scaling(args: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Each case with each number of threads, in processes of their own; `speedup` is over the first number named."""
    shape = _shape(args.model, args.quantization)
    for case in args.cases:
        work = workload(case, shape["vocab_size"])
        first: float | None = None
        for threads in args.threads:
            options = {**_options(args), "num_threads": threads}
            found = contest("quire", case, args.model, args.repeat, options)
            seconds = statistics.median(found["seconds"])
            first = seconds if first is None else first
            _print({"bench": "cpu", "case": case, "model": args.model, "unit": _UNITS[case], **_options(args),
                    "threads": threads,
                    "quire": _figure(case, work, seconds), "speedup": round(first / seconds, 2),
                    "quire_seconds": [round(s, 3) for s in found["seconds"]], **machine})
    return 0


def _case(
    case: str, args: argparse.Namespace, shape: dict[str, int], ceilings: Ceilings
) -> tuple[dict[str, Any], Ceilings]:
    """Quire and its rivals take turns, each in a process that lives as long as the case. The limit is of the highest
    ceilings so far, those of after the case included."""
    work = workload(case, shape["vocab_size"])
    engines = {"quire": _options(args)}
    engines |= {rival: {"vocab_size": shape["vocab_size"]} for rival in ([] if args.no_rival else args.rivals)}
    with ExitStack() as stack:
        running = {name: stack.enter_context(CaseProcess(name, case, args.model, options))
                   for name, options in engines.items()}
        for _ in range(args.repeat):
            for each in running.values():
                each.run()
        found = {name: each.finish() for name, each in running.items()}
    ceilings = ceilings.or_higher(measure_ceilings())
    mine, limit = found.pop("quire"), limit_seconds(work, shape, ceilings)
    seconds = statistics.median(mine["seconds"])
    extra = mine["peak_bytes"] - shape["weight_bytes"] - mine["kv_pool_bytes"]
    line: dict[str, Any] = {
        "bench": "cpu", "case": case, "model": args.model, "unit": _UNITS[case],
        "quantization": args.quantization or "none (float32)",
        "prompt_tokens": work.num_prompt_tokens, "output_tokens": work.num_output_tokens,
        "quire": _figure(case, work, seconds), "quire_seconds": [round(s, 3) for s in mine["seconds"]],
        "limit": _figure(case, work, limit), "share_of_limit": round(limit / seconds, 3),
        "first_token_ms": round(mine["first_token_seconds"] * 1e3, 1),
        "peak_MB": round(mine["peak_bytes"] / 1e6), "peak_over_weights_and_pool_MB": round(extra / 1e6),
    }
    for name, rival in found.items():
        theirs = statistics.median(rival["seconds"])
        line |= {name: _figure(case, work, theirs), f"ratio_to_{name}": round(theirs / seconds, 2),
                 f"{name}_seconds": [round(s, 3) for s in rival["seconds"]],
                 f"{name}_peak_MB": round(rival["peak_bytes"] / 1e6)}
    if found:
        best = min(statistics.median(rival["seconds"]) for rival in found.values())
        line["ratio"] = round(best / seconds, 2)
    return line, ceilings


def _figure(case: str, work: Workload, seconds: float) -> float:
    if case == "D":
        return round(seconds, 3)
    return round((work.num_prompt_tokens if case == "C" else work.num_output_tokens) / seconds, 2)


def limit_seconds(work: Workload, shape: dict[str, int], ceilings: Ceilings) -> float:
    """No engine of this model in these formats can be faster: each distinct prompt token is computed once, each decode
    step reads every weight once with all requests in it and each sequence's KV once, at the measured ceilings.
    Integer GEMMs run at `int8_rate` times the rate of float32; attention is float32."""
    rate = ceilings.flops_per_s * shape["int8_rate"]
    per_token = 2 * shape["layer_parameters"]
    head = 2 * shape["head_parameters"]
    prompts = {tuple(p[: i + 1]) for p in work.prompts for i in range(15, len(p), 16)}
    distinct = 16 * len(prompts) + sum(len(p) % 16 for p in work.prompts)
    attention = sum(2 * len(p) ** 2 * shape["query_width"] * shape["layers"] for p in work.prompts[:1]) \
        if len(work.prompts) == 1 else 0
    prefill = (distinct * per_token + len(work.prompts) * head) / rate + attention / ceilings.flops_per_s
    decoded = [n - 1 for n in work.outputs]
    steps = max(decoded)
    kv = sum((len(p) + n / 2) * n * shape["kv_bytes_per_token"] for p, n in zip(work.prompts, decoded, strict=True))
    read = (steps * shape["weight_bytes"] + kv) / ceilings.read_bytes_per_s
    compute = sum(decoded) * (per_token + head) / rate
    return prefill + max(read, compute)


def _shape(model: str, quantization: str | None) -> dict[str, int]:
    from quire.models.loader.source import resolve_model
    from quire.models.registry import read_spec

    source = resolve_model(model)
    spec = read_spec(source.config)
    head = spec.vocab_size * spec.embed_dim
    table = 0 if spec.tied_head else head
    weight_bytes, rate = 4 * spec.num_parameters, 1
    if quantization is not None:
        from quire.bench.cpu.kernels import int8_rate

        if source.stores_integers or quantization == "file":  # the file's own bits
            rate = int8_rate() if source.stores_integers else 1
            weight_bytes = sum(file.stat().st_size for file in source.weight_files())
        else:
            rate, bits = int8_rate(), 8 if quantization == "int8" else 4
            # 16 bits of scale for 32 codes, and as many of offset in 4 bits; embedding and head have 8 bits.
            inner = (spec.num_parameters - head - table) * (bits + (1 if bits == 4 else 0.5)) / 8
            weight_bytes = int(inner + (head + table) * 8.5 / 8)
    return {
        "vocab_size": spec.vocab_size, "layers": spec.num_layers, "int8_rate": rate,
        "weight_bytes": weight_bytes, "head_parameters": head,
        "layer_parameters": spec.num_parameters - head - table,
        "kv_bytes_per_token": spec.kv_bytes_per_token,
        "query_width": spec.layers[0].attention.num_heads * spec.layers[0].attention.head_dim,
    }


def _child(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a module prints in a process of its own."""
    done = subprocess.run(module_command(module, *arguments), capture_output=True, text=True, check=False,
                          env=child_environment())
    if done.returncode:
        raise QuireError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _cold_start(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Process start to first token on the cached model."""
    command = module_command("quire.bench.first_token", model, json.dumps(options),
                             json.dumps("The capital of France is"), "")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=child_environment())
        seconds.append(time.perf_counter() - start)
    return {"bench": "cpu", "case": "start", "model": model, "unit": "s from process start to first token and exit",
            **options,
            "quire": round(statistics.median(seconds), 2), "runs": [round(s, 2) for s in seconds]}


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
