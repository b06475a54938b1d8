"""Times the GEMMs of few rows on this GPU and writes the table that `quire.kernels.triton.gemm_table` reads.

Every way to compute a GEMM is timed whole (with the norm, the gate and the residual around it) inside a captured
graph over weights too large for the cache. Kernels are compiled beforehand by one process per weight.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.gpu.cases import MODELS
from quire.child import child_environment, module_command

ROW_SIZES = ((1, 512, 2), (1, 1024, 4), (1, 2048, 8), (1, 2048, 4), (1, 4096, 16), (2, 512, 2), (2, 1024, 4),
             (2, 2048, 8), (4, 256, 1), (4, 512, 2), (4, 1024, 4), (4, 2048, 8), (8, 512, 2), (8, 1024, 4))  # fmt: skip
ROWS = [1, 2, 4]
_LEAST_BYTES = 3e8
_MOST_HELD = 512
"""Elements of the weight that a thread reads: with more of them in flight the registers overflow."""


def weights_of(model: str) -> list[tuple[str, int, int]]:
    """(form at one row, features, width) of every GEMM of a model; those of experts are tuned by
    `tune_experts`."""
    config = MODELS[model]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    experts = config.get("num_experts")
    mlp = [("plain", experts, hidden)] if experts else [("gated", 2 * inner, hidden), ("plain", hidden, inner)]
    return [("norm", query + 2 * key, hidden), ("plain", hidden, query), *mlp, ("norm", config["vocab_size"], hidden)]


def tune(models: list[str], rows: list[int], pdl: bool, note: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """The table's entries, best kernel each; `note` hears everything that was timed."""
    jobs = [(model, index) for model in models for index in range(len(weights_of(model)))]
    here = module_command("quire.bench.gpu.tune")
    last = [str(int(pdl)), *map(str, rows)]
    compiling = [subprocess.Popen([*here, model, str(index), *last], env=child_environment()) for model, index in jobs]
    for process in compiling:
        process.wait()
    entries = []
    for model, index in jobs:
        for line in time_weight(model, index, rows, pdl):
            note(line)
            name, rate = max(line["rates"].items(), key=lambda item: item[1])
            kernel, *sizes = name.split(" ")
            entries.append({"rows": line["rows"], "features": line["features"], "width": line["width"],
                            "form": line["form"], "kernel": kernel,
                            "sizes": [int(size) for size in sizes], "TB/s": round(rate, 2)})  # fmt: skip
    return entries


def time_weight(model: str, index: int, counts: list[int], pdl: bool, dry: bool = False) -> Iterator[dict[str, Any]]:
    import torch

    form, features, width = weights_of(model)[index]
    size = features * width * 2
    copies = 1 if dry else max(2, math.ceil(_LEAST_BYTES / size))
    weights = [torch.randn(features, width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    for rows in counts:
        ways = _one_row(form, features, width, pdl) if rows == 1 else _several(rows, features, width)
        rates = {}
        for name, call in ways.items():
            try:
                seconds = graph_seconds([partial(call, w) for w in weights], dry)
                rates[name] = size / seconds / 1e12
            except Exception as error:
                print(f"{name} on {features}x{width}, {rows} rows: {error}", file=sys.stderr)
        yield {"model": model, "rows": rows, "features": features, "width": width,
               "form": form if rows == 1 else "plain", "rates": rates}  # fmt: skip


def _one_row(form: str, features: int, width: int, pdl: bool) -> dict[str, Callable[[Any], Any]]:
    """Every way to compute a GEMM of one row with its norm, gate and residual."""
    import torch

    from quire.kernels.triton import activation, linear_row, norm

    x = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
    gain = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(1, features, device="cuda", dtype=torch.bfloat16)
    fused: dict[str, Any] = {"residual": residual} if form == "plain" else {"norm": gain, "eps": 1e-6}
    if form == "gated":
        fused["gated"] = "silu"

    def around(gemm: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        def call(w: Any) -> Any:
            found = gemm(x if form == "plain" else norm.rms_norm(x, gain, 1e-6), w)
            return activation.act_mul(found, "silu") if form == "gated" else found

        return call

    added = residual if form == "plain" else None
    ways: dict[str, Callable[[Any], Any]] = {
        "library": around(lambda v, w: torch.mm(v, w.t()) if added is None else torch.mm(v, w.t()).add_(added))
    }
    for shape in ROW_SIZES:
        held = shape[0] * width * (2 if form == "gated" else 1) // (32 * shape[2])
        if shape[1] <= 2 * width and held <= _MOST_HELD:
            sizes, named = linear_row.RowShape(*shape), " ".join(map(str, shape))
            ways["row " + named] = partial(linear_row.linear_row, x, sizes=sizes, pdl=pdl, **fused)
            if form != "plain":
                ways["norm_then_row " + named] = partial(_norm_then_row, x, gain, sizes, fused.get("gated"), pdl)
    return ways


def _norm_then_row(x: Any, gain: Any, sizes: Any, gated: str | None, pdl: bool, weight: Any) -> Any:
    """The norm in its own kernel, then the GEMM: reads less than the fused kernel, each program of which reads the
    norm's whole input."""
    from quire.kernels.triton import linear_row, norm

    return linear_row.linear_row(norm.rms_norm(x, gain, 1e-6, pdl=pdl), weight, gated=gated, sizes=sizes, pdl=pdl)


def _several(rows: int, features: int, width: int) -> dict[str, Callable[[Any], Any]]:
    import torch

    from quire.kernels.triton import linear_few

    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    ways: dict[str, Callable[[Any], Any]] = {"library": lambda w: torch.mm(x, w.t())}
    if rows <= linear_few.MAX_VECTOR_ROWS and features <= 2048:
        ways["vector"] = lambda w: linear_few.linear_vector(x, w)
    return ways


def graph_seconds(calls: list[Callable[[], Any]], dry: bool = False, repeats: int = 5) -> float:
    """Seconds per call inside a captured graph of all calls; the median of replays."""
    if dry:
        calls[0]()
        return 1.0
    graph = captured(calls)
    times = [replay_seconds(graph) for _ in range(repeats + 1)][1:]
    return sorted(times)[repeats // 2] / len(calls)


def graphs_seconds(ways: list[list[Callable[[], Any]]], rounds: int = 7) -> list[float]:
    """The same for several ways to do one thing, in turns: a chip that grows hot slows all of them alike."""
    graphs = [captured(calls) for calls in ways]
    for graph in graphs:
        replay_seconds(graph)
    times = [[replay_seconds(graph) for graph in graphs] for _ in range(rounds)]
    middles = [sorted(column)[rounds // 2] for column in zip(*times, strict=True)]
    return [middle / len(calls) for middle, calls in zip(middles, ways, strict=True)]


def sustained_seconds(calls: list[Callable[[], Any]], seconds: float) -> float:
    """The same under load: replays for so long, of which the second half counts, when the clock has fallen to what the
    chip can keep up."""
    import torch

    graph = captured(calls)
    replay_seconds(graph)
    half = max(1, math.ceil(seconds / 2 / replay_seconds(graph)))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(half):
        graph.replay()
    begin.record()
    for _ in range(half):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / half / len(calls)


def captured(calls: list[Callable[[], Any]]) -> Any:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache before every capture.
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for call in calls:
            call()
        graph.capture_end()
    return graph


def replay_seconds(graph: Any) -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def write(path: str, entries: list[dict[str, Any]], cublaslt: int | None = None) -> None:
    """One line per entry, so that a change of the table can be read; what was not timed now stays as it was."""
    import torch

    head: dict[str, Any] = {"device": torch.cuda.get_device_name(), "dtype": "bfloat16"}
    head["date"] = time.strftime("%Y-%m-%d")
    if Path(path).exists():
        timed = {_key(entry) for entry in entries}
        file = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = [entry for entry in file["gemms"] if _key(entry) not in timed] + entries
        cublaslt = cublaslt or file.get("cublaslt")
    if cublaslt:
        head["cublaslt"] = cublaslt
    entries = sorted(entries, key=lambda entry: (entry["width"], entry["features"], entry["rows"]))
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    with open(path, "w", encoding="utf-8") as target:
        target.write(json.dumps(head)[:-1] + ', "gemms": [\n' + lines + "\n]}\n")


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["rows"], entry["features"], entry["width"], entry["form"]


if __name__ == "__main__":
    list(time_weight(sys.argv[1], int(sys.argv[2]), [int(word) for word in sys.argv[4:]], sys.argv[3] == "1", dry=True))
