"""`quire bench gpu`: cases a to e on a GPU with random weights of Qwen3 shapes, against what the hardware allows.

a: 256 sequences of 100 to 1,024 tokens in and out; b: one stream of 128 in, 512 out; c: 32 of 1,024 in, 256
out; d: 16 prompts of 4,096; e: one prompt of 128,000, and eight of 32,000, 256 out; start: from `python` to the first
token. Kernels are warm before a clock starts, and the clock is around `LLM.generate`. Per case: the figure (median,
lowest, highest run), the same by the core's own time (its first step to its last), its share of the physical limit (an
H200's 4.27 TB/s and 768 TFLOP/s, measured), the host's time a step and what of it the GPU waited for, the share of time
the GPU was busy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.gpu.cases import (
    CASES,
    FP8_RIVALS,
    MAX_MODEL_LEN,
    MODELS,
    RIVALS,
    USUAL,
    kind_of,
    least_by_kind,
    least_seconds,
    requests_of,
    shares,
)
from quire.bench.gpu.timeline import draw, middle
from quire.child import child_environment, module_command
from quire.errors import QuireError
from quire.kernels.quantized import Rounding
from quire.machine import describe_machine

if TYPE_CHECKING:
    from quire.bench.gpu.engine import Run
    from quire.worker.gpu.options import DeviceOptions
    from quire.worker.gpu.worker import GpuWorker

EXAMPLES = (
    "examples:\n"
    "  quire bench gpu --json\n"
    "  quire bench gpu --cases a b --models 0.6b\n"
    "  quire bench gpu --no-profile --repeat 1 --models 8b\n"
    "  quire bench gpu --cases b --deterministic\n"
    "  quire bench gpu --sampling --models 0.6b\n"
    "  quire bench gpu --heads --models 8b"
)
_PROFILED_TOKENS = 24
_TOP_KERNELS = 14
_SWITCHES = {
    "--fixed-prefetch": "with --deterministic: GEMMs of up to 8 rows, and those of the table, by kernels that prefetch,"
                        " same bits",
    "--fixed-fusion": "with --deterministic: norms and gates inside GEMMs of up to 8 rows, same bits",
    "--few-rows": "GEMMs of 2 to 8 rows with norm, gate and residual in them",
    "--launch-early": "programmatic dependent launch in decode steps",
    "--pad-mixed": "small mixed steps padded to fixed shapes and replayed as graphs",
    "--prompt-rows": "prompts without context attend to their step's rows, not to the cache",
    "--fuse-rope": "rotation inside the attention of decode steps",
    "--named-algorithms": "GEMMs on cuBLAS use the algorithms of the table, not its own choice",
}  # fmt: skip
"""What can be left out, to see what it brings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*CASES, "e", "start"]
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=names,
                        help="which (default: a b c d); e runs on 8b, or on the one model that --models names")
    parser.add_argument("--models", nargs="+", default=list(USUAL), choices=MODELS, metavar="NAME",
                        help=f"some of {', '.join(MODELS)} (default: {' '.join(USUAL)}); all take part in a and b, "
                        "0.6b, 8b and 30b-a3b in c and d, others if --cases asks for them")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of a case; the median counts (default: 3)")
    parser.add_argument("--json", action="store_true",
                        help="JSON lines: the machine, each model's build, then per case its figure and its profile")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True,
                        help="also list the costliest kernels of a shortened run, with the share of bandwidth or FLOPs "
                             "that their kind of work reaches (default: on)")
    parser.add_argument("--depth", type=int, default=2, help="steps in flight (default: 2)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV block (default: 16)")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens of a step (default: the case's)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"),
                        help="of weights and activations (default: bfloat16)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"),
                        help="of keys and values (default: as --dtype)")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"),
                        help="of the layers' weights, made at load; int4 in groups of 128 (default: none)")
    parser.add_argument("--enforce-eager", action="store_true", help="no captured graphs")
    parser.add_argument("--deterministic", action="store_true", help="fixed orders of summation: what they cost")
    for name, text in _SWITCHES.items():
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=True, help=f"{text} (default: on)")
    parser.add_argument("--timeline", metavar="SVG", help="draw some steps of the last run here")
    parser.add_argument("--accuracy", metavar="MODEL",
                        help="instead: how far each dtype is from float32 on the CPU (emulated without a GPU)")
    parser.add_argument("--texts", type=int, default=40, help="with --accuracy: how many texts (default: 40)")
    parser.add_argument("--tune-rows", type=int, nargs="+",
                        help="with --tune, --tune-prefetch and --gemm: GEMMs of how many rows (default: all in the "
                             "table; --gemm some)")
    parser.add_argument("--tune", metavar="FILE", help="instead: time GEMMs of few rows, write the table here")
    parser.add_argument("--tune-prefetch", metavar="FILE",
                        help="instead: time GEMMs that prefetch their weights, add those that win to the table in "
                             "this file")
    parser.add_argument("--tune-library", metavar="FILE",
                        help="instead: time cuBLASLt's algorithms, add those that win to the table in this file")
    parser.add_argument("--gemm", nargs="+", choices=("fp8", "int8", "int4"),
                        help="instead: GEMMs of quantized weights of the models' shapes, every kernel and its limit")
    parser.add_argument("--tune-quantized", metavar="FILE",
                        help="with --gemm: add the fastest kernels of fp8 and int4 to the table in this file")
    parser.add_argument("--row-sizes", nargs="+", metavar="SIZES",
                        help="instead: these sizes of the kernel of one row of int4 (16,8,1,3,3,0) on the models' down")
    parser.add_argument("--mixed", action="store_true",
                        help="instead: small steps of a short prompt beside eight decoding sequences")
    parser.add_argument("--heads", action="store_true",
                        help="instead: drafts of a head of EAGLE-3's size that are right with chances 0.8, 0.7, 0.6, "
                             "0.5, against the same without drafts")
    parser.add_argument("--batch", type=int, nargs="+", metavar="N", help="with --heads: streams (default: 1 8 64)")
    parser.add_argument("--max-tokens", type=int, default=160, metavar="N",
                        help="with --heads: tokens of each stream (default: 160)")
    parser.add_argument("--sampling", action="store_true",
                        help="instead: what sampling settings cost, at 256 sequences and for one stream")
    parser.add_argument("--serve", action="store_true",
                        help="instead: 256 streams of 512 in, 512 out over HTTP, against the same through generate")
    parser.add_argument("--tokens", action="store_true", help="print a checksum of each case's tokens")


def run(args: argparse.Namespace) -> int:
    import torch

    if args.accuracy:
        _accuracy(args, emulated=not torch.cuda.is_available())
        return 0
    if not torch.cuda.is_available():
        raise QuireError("`quire bench gpu` needs a CUDA GPU, and torch finds none here")
    if args.repeat < 1:
        raise QuireError("--repeat must be at least 1")
    if args.tune_quantized and not args.gemm:
        raise QuireError("--tune-quantized needs --gemm fp8, int4 or both: which GEMMs to time")
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
               **describe_machine()}
    _show(args, {"bench": "gpu", "case": "machine", **machine}, " ".join(f"{k}={v}" for k, v in machine.items()))
    if args.tune or args.tune_library or args.tune_prefetch:
        _tune(args)
        return 0
    if args.gemm:
        from quire.bench.gpu import gemm

        gemm.measure(args.models, args.gemm, lambda line: _show(args, line, gemm.text(line)), args.tune_rows,
                     args.tune_quantized)
        return 0
    if args.row_sizes:
        from quire.bench.gpu import row_sizes

        row_sizes.measure(args.models, args.row_sizes, lambda line: _show(args, line, row_sizes.text(line)))
        return 0
    if args.serve:
        from quire.bench.gpu import serve as gpu_serve

        for model in args.models:
            line = gpu_serve.measure(MODELS[model], model, {"device": "cuda", "dtype": args.dtype})
            _show(args, line, gpu_serve.text(line))
        return 0
    if args.heads:
        from quire.bench.gpu import heads as gpu_heads

        for model in args.models:
            for line in gpu_heads.measure(MODELS[model], model, args):
                _show(args, line, gpu_heads.text(line))
        return 0
    if args.sampling:
        from quire.bench.gpu import sampling as gpu_sampling

        for model in args.models:
            for line in gpu_sampling.measure(model, args.repeat, args.deterministic, args.enforce_eager):
                _show(args, line, gpu_sampling.text(line))
        return 0
    if args.mixed:
        from quire.bench.gpu import mixed as gpu_mixed

        for model in args.models:
            for padded in (False, True):
                for line in gpu_mixed.measure(model, enforce_eager=args.enforce_eager, pad_mixed=padded):
                    _show(args, line, gpu_mixed.text(line))
        return 0
    for model in args.models:
        if "start" in args.cases:
            _start(model, args)
        if "e" in args.cases and (model == "8b" or len(args.models) == 1):
            _long_prompts(model, args)
        cases = [case for case in args.cases if case in CASES and (model in CASES[case].models or len(args.cases) < 4)]
        if cases:
            _model(model, cases, args)
    return 0


def _accuracy(args: argparse.Namespace, emulated: bool) -> None:
    from quire.bench.gpu import accuracy as gpu_accuracy

    lines = gpu_accuracy.emulate if emulated else gpu_accuracy.measure
    for line in lines(args.accuracy, args.texts):
        _show(args, line, " ".join(f"{key}={value}" for key, value in line.items() if key not in ("bench", "case")))


def _options(
    args: argparse.Namespace, max_num_seqs: int, max_model_len: int, step_tokens: int = 16384
) -> DeviceOptions:
    from quire.worker.gpu.options import DeviceOptions

    return DeviceOptions(
        dtype=args.dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or step_tokens,
        max_model_len=max_model_len,
        enforce_eager=args.enforce_eager,
        deterministic=args.deterministic,
        kv_cache_dtype=args.kv_cache_dtype,
        launch_early=args.launch_early,
        fuse_rope=args.fuse_rope,
        prompt_rows=args.prompt_rows,
        pad_mixed=args.pad_mixed,
        named_algorithms=args.named_algorithms,
        fixed_prefetch=args.fixed_prefetch,
        fixed_fusion=args.fixed_fusion,
        few_rows=args.few_rows,
        rounding=_rounding(args),
    )


def _long_prompts(model: str, args: argparse.Namespace) -> None:
    from quire.bench.gpu import long_prompts

    options = _options(args, long_prompts.MAX_SEQS, long_prompts.MAX_MODEL_LEN, long_prompts.STEP_TOKENS)
    for line in long_prompts.measure(model, options, block_size=args.block_size, depth=args.depth, repeat=args.repeat,
                                     quantization=args.quantization):  # fmt: skip
        _show(args, line, long_prompts.text(line))


def _model(model: str, cases: list[str], args: argparse.Namespace) -> None:
    """One worker for all cases of a model; a fresh scheduler and cache for each."""
    from quire.bench.gpu.engine import build_worker

    options = _options(args, max(CASES[case].max_num_seqs for case in cases), MAX_MODEL_LEN)
    began = time.perf_counter()
    worker = build_worker(MODELS[model], options, args.block_size)
    built = time.perf_counter() - began
    parts = {name: round(seconds, 2) for name, seconds in worker.timings.items()}
    _show(args, {"bench": "gpu", "case": "build", "model": model, "seconds": round(built, 2), **parts,
                 "kv_blocks": worker.pool.num_blocks},
          f"{model}: built in {built:.1f} s {parts}, {worker.pool.num_blocks} KV blocks")
    try:
        for case in cases:
            _case(case, model, worker, options, args)
    finally:
        worker.close()


def _case(case: str, model: str, worker: GpuWorker, options: DeviceOptions, args: argparse.Namespace) -> None:
    from quire.bench.gpu.engine import GpuClock, build_core, front_door, generate

    shape = CASES[case]
    budget = args.max_num_batched_tokens or shape.max_num_batched_tokens
    limits = dataclasses.replace(options, max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=budget)
    core = build_core(worker, limits, block_size=args.block_size, depth=args.depth)
    llm = front_door(core, worker)
    generate(llm, core, requests_of(case, -1, max_tokens=3))
    runs: list[tuple[Run, float]] = []
    for round_ in range(args.repeat):
        with GpuClock(worker) as clock:
            done = generate(llm, core, requests_of(case, round_), keep_tokens=args.tokens)
        runs.append((done, clock.seconds()))
    if args.timeline:
        title = f"Case {case}, {model}, {args.depth} steps in flight: ten steps from the middle of the run"
        Path(args.timeline).write_text(draw(middle(clock.spans()), title), encoding="utf-8")
    line = _line(case, model, runs, args)
    _show(args, line, _text(line))
    if "num_experts" in MODELS[model]:
        _experts(case, model, worker, limits, args)
    if args.profile:
        kernels, kinds, busy = _profile(core, case, MODELS[model], _element(args), args.quantization)
        _show(args, {"bench": "gpu", "case": case, "model": model, "kernels": kernels, "kinds": kinds,
                     "kernel_busy_share": busy}, _table(kernels, kinds, busy))


def _experts(case: str, model: str, worker: GpuWorker, limits: DeviceOptions, args: argparse.Namespace) -> None:
    from quire.bench.gpu import experts
    from quire.bench.gpu.engine import build_core

    core = build_core(worker, limits, block_size=args.block_size, depth=1)
    requests = requests_of(case, 2000, max_tokens=experts.TOKENS)
    top_k = MODELS[model]["num_experts_per_tok"]
    line = experts.line_of(case, model, experts.spread(core, worker.decoder.expert_load, requests, top_k))
    _show(args, line, experts.text(line))


def figure_of(case: str, run: Run) -> float:
    if case == "b":
        return 1e3 * (run.seconds - run.first_token) / max(1, run.output_tokens - 1)
    return (run.prompt_tokens if case == "d" else run.output_tokens) / run.seconds


def _line(case: str, model: str, runs: list[tuple[Run, float]], args: argparse.Namespace) -> dict[str, Any]:
    figures = [figure_of(case, run) for run, _ in runs]
    middle = statistics.median(figures)
    run, busy = runs[figures.index(min(figures, key=lambda found: abs(found - middle)))]
    least = least_seconds(case, MODELS[model], requests_of(case), _element(args), args.quantization)
    tokens = run.prompt_tokens if case == "d" else run.output_tokens
    limit = 1e3 * least / tokens if case == "b" else tokens / least
    rival = {None: RIVALS, "fp8": FP8_RIVALS}.get(args.quantization, {}).get((case, model))
    better = (lambda mine, other: other / mine) if case == "b" else (lambda mine, other: mine / other)
    inside = figure_of(case, dataclasses.replace(run, seconds=run.core_seconds,
                                                 first_token=run.first_token - run.before_core))
    line: dict[str, Any] = {
        "bench": "gpu", "case": case, "model": model, "unit": CASES[case].figure,
        "median": round(middle, 3), "low": round(min(figures), 3), "high": round(max(figures), 3), "runs": len(runs),
        "core": round(inside, 3),
        "limit": round(limit, 3), "share_of_limit": round(better(middle, limit), 3),
        "vllm": rival, "times_vllm": None if rival is None else round(better(middle, rival), 2),
        "seconds": round(run.seconds, 3), "first_tokens_s": round(run.first_token, 3), "steps": run.steps,
        "host_ms_per_step": round(1e3 * run.plan_seconds / run.steps, 3),
        "exposed_ms_per_step": round(1e3 * max(0.0, run.seconds - busy) / run.steps, 3),
        "gpu_busy_share": round(min(1.0, busy / run.seconds), 3),
        "options": {name: getattr(args, name) for name in ("depth", "block_size", "dtype", "kv_cache_dtype",
                                                           "quantization",
                                                           "enforce_eager", "deterministic", "fixed_prefetch",
                                                           "fixed_fusion", "few_rows",
                                                           "launch_early",
                                                           "named_algorithms", "max_num_batched_tokens",
                                                           "fuse_rope", "prompt_rows", "pad_mixed")},
    }
    if args.tokens:
        line["tokens"] = f"{hash(tuple(map(tuple, run.tokens))) & 0xFFFFFFFF:08x}"
    return line


def _text(line: dict[str, Any]) -> str:
    rival = "" if line["vllm"] is None else f", {line['times_vllm']:.2f} x vLLM 0.26.0 ({line['vllm']})"
    tokens = f", tokens {line['tokens']}" if "tokens" in line else ""
    return (
        f"{line['case']} {line['model']:>4}: {line['median']:g} {line['unit']} ({line['low']:g} to {line['high']:g}, "
        f"{line['runs']} runs), core {line['core']:g}, {line['share_of_limit']:.0%} of the limit {line['limit']:g}"
        f"{rival}; "
        f"{line['steps']} steps, host {line['host_ms_per_step']:.2f} ms a step, {line['exposed_ms_per_step']:.2f} "
        f"exposed, GPU busy {line['gpu_busy_share']:.0%}{tokens}"
    )


def _rounding(args: argparse.Namespace) -> Rounding | None:
    """Of the weights, as the option `quantization` makes it on a GPU."""
    return {None: None, "fp8": Rounding(None, fp8=True), "int8": Rounding(8, 0),
            "int4": Rounding(4, 128, True)}[args.quantization]


def _element(args: argparse.Namespace) -> int:
    return 4 if args.dtype == "float32" else 2


def _profile(
    core: Any, case: str, config: dict[str, Any], element: int, quantization: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """Kernels of a shortened run by the time they take, the kinds of work they are with the share of the hardware's
    limit each reaches, and the share of the wall clock that they fill together."""
    from torch.profiler import ProfilerActivity, profile

    from quire.bench.gpu.engine import run_requests

    requests = requests_of(case, 1000, max_tokens=1 if case == "d" else _PROFILED_TOKENS)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run = run_requests(core, requests)
    totals = shares([
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in found.events()
        if str(event.device_type).endswith("CUDA") and event.device_time_total > 0
    ])  # fmt: skip
    everything = sum(seconds for seconds, _ in totals.values()) or 1.0
    kinds = _kinds(totals, everything, least_by_kind(config, requests, element, quantization))
    first = sorted(totals.items(), key=lambda item: -item[1][0])[:_TOP_KERNELS]
    kernels = [{"kernel": name[:70], "share": round(seconds / everything, 3), "calls": count,
                "us_per_call": round(1e6 * seconds / count, 2), "kind": kind_of(name),
                **{of: share for of, share in kinds[kind_of(name)].items() if of.startswith("share_of_")}}
               for name, (seconds, count) in first]
    return kernels, kinds, round(everything / run.seconds, 3)


def _kinds(totals: dict[str, tuple[float, int]], everything: float,
           least: dict[str, tuple[float, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (seconds, _) in totals.items():
        kind = found.setdefault(kind_of(name), {"seconds": 0.0})
        kind["seconds"] += seconds
    for name, kind in found.items():
        kind["share"] = round(kind["seconds"] / everything, 3)
        if name in least and kind["seconds"]:
            bound, of = least[name]
            kind[f"share_of_{of}"] = round(bound / kind["seconds"], 3)
        kind["seconds"] = round(kind["seconds"], 5)
    return found


def _table(kernels: list[dict[str, Any]], kinds: dict[str, Any], busy: float) -> str:
    rows = [f"    {k['share']:6.1%} {k['calls']:6d} x {k['us_per_call']:9.2f} us  {k['kernel']} ({k['kind']})"
            for k in kernels]
    for name, kind in kinds.items():
        reached = [f"{share:.0%} of {of[9:]}" for of, share in kind.items() if of.startswith("share_of_")]
        rows.append(f"    {name}: {kind['share']:.1%} of the time" + (f", at {reached[0]}" if reached else ""))
    return "\n".join([*rows, f"    kernels fill {busy:.0%} of the (profiled, so slower) run"])


def _start(model: str, args: argparse.Namespace) -> None:
    """Process start to the first token, as a user sees it: `LLM` with random weights."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "max_model_len": 4112}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
        # A kernel cache of its own, so that the first start is a cold one wherever this runs.
        environment = child_environment(TRITON_CACHE_DIR=str(Path(folder, "kernels")))
        command = module_command("quire.bench.first_token", folder, json.dumps(options), "[1, 2, 3]", "at once")
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if "first token" not in done.stdout:
                raise QuireError(f"the start of {model} failed: {done.stderr.strip()[-400:]}")
            seconds.append(round(time.perf_counter() - began, 2))
    _show(args, {"bench": "gpu", "case": "start", "model": model, "cold_seconds": seconds[0],
                 "warm_seconds": seconds[1:]},
          f"start {model}: `python` to the first token {seconds[0]} s with an empty kernel cache, "
          f"{seconds[1]} and {seconds[2]} s with the one that it left")


def _tune(args: argparse.Namespace) -> None:
    """One after another, in the order in which they build on one another."""
    from quire.bench.gpu import tune as gpu_tune
    from quire.bench.gpu import tune_library as gpu_tune_library
    from quire.bench.gpu import tune_prefetch as gpu_tune_prefetch

    def note(line: dict[str, Any]) -> None:
        _show(args, line, str(line))

    if args.tune:
        gpu_tune.write(args.tune, gpu_tune.tune(args.models, args.tune_rows or gpu_tune.ROWS, args.launch_early, note))
    if args.tune_library:
        gpu_tune_library.tune(args.models, args.tune_library, note)
    if args.tune_prefetch:
        gpu_tune_prefetch.tune(args.models, args.tune_prefetch, note, args.tune_rows)


def _show(args: argparse.Namespace, line: dict[str, Any], text: str) -> None:
    print(json.dumps(line) if args.json else text, flush=True)
