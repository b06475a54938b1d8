"""Times the algorithms that cuBLASLt offers for a model's products and adds the winners to the table of products.

The library's heuristic is right for most products; where another of its algorithms (or one of our kernels, which the
table knows already) is faster by `_LEAST_GAIN`, the table names it. Timed in captured graphs over weights too large
for the cache, as `quire.bench.gpu_tune` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.gpu_tune import graph_seconds, graphs_seconds, weights_of, write

ROWS = (2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 512, 1024, 2048, 4096, 8192,
        16384)  # fmt: skip
_HEAD_ROWS = 256
"""More rows than this never meet the output layer."""
_LEAST_BYTES = 2e8
_LEAST_GAIN = 1.015
_FINALISTS = 4


def tune(models: list[str], path: str, note: Callable[[dict[str, Any]], None], rows: tuple[int, ...] = ROWS) -> None:
    from quire.kernels import cublas

    known = json.loads(Path(path).read_text(encoding="utf-8"))["products"] if Path(path).exists() else []
    before = {(e["rows"], e["features"], e["width"]): e for e in known if e["form"] == "plain"}
    entries = []
    done = set()
    for model in models:
        for _, features, width in weights_of(model):
            if (features, width) in done:
                continue
            done.add((features, width))
            for entry in _weight(features, width, rows, before):
                note({key: value for key, value in entry.items() if key != "algorithm"})
                entries.append(entry)
        write(path, entries, cublas.version())


def _weight(
    features: int, width: int, counts: tuple[int, ...], before: dict[tuple[int, int, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    import torch

    from quire.kernels.cublas import CublasLt

    device = torch.device("cuda")
    library = CublasLt(device, torch.bfloat16)
    copies = max(2, math.ceil(_LEAST_BYTES / (features * width * 2)))
    weights = [torch.randn(features, width, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    entries = []
    for rows in counts:
        if rows > _HEAD_ROWS and features > 100_000:
            continue
        held = before.get((rows, features, width), {"kernel": "library", "sizes": []})
        try:
            entries.append(_timed(library, weights, rows, held))
        except Exception as error:  # one product that cannot be timed must not lose the others
            print(f"{rows} rows of {features} x {width}: {error!r}", flush=True)
    library.close()
    return entries


def _timed(library: Any, weights: list[Any], rows: int, held: dict[str, Any]) -> dict[str, Any]:
    """The table's entry: who wins, and by how much."""
    import torch

    features, width = weights[0].shape
    x = torch.randn(rows, width, device=weights[0].device, dtype=torch.bfloat16)
    out = torch.empty(rows, features, device=x.device, dtype=x.dtype)
    used = weights[: 2 if rows >= 1024 else len(weights)]

    def seconds(call: Callable[[Any], Any], repeats: int) -> float:
        return graph_seconds([partial(call, weight) for weight in used], repeats=repeats)

    now = _present(held, x, out)
    found = [c.code for c in library.candidates(rows, features, width)]
    right = [code for code in found if _right(library, x, used[0], code)]
    first = sorted((seconds(partial(_named, library, x, code, out), 1), code) for code in right)
    finals = [code for _, code in first[:_FINALISTS]]
    ways: list[Callable[[Any], Any]] = [now, *(partial(_named, library, x, code, out) for code in finals)]
    present, *others = graphs_seconds([[partial(way, weight) for weight in used] for way in ways])
    best, code = min(zip(others, finals, strict=True), default=(math.inf, ""))
    wins = present / best >= _LEAST_GAIN
    taken = min(best, present) if wins else present
    entry = {"rows": rows, "features": features, "width": width, "form": "plain", "kernel": held["kernel"],
             "sizes": held.get("sizes", []), "TB/s": round(features * width * 2 / taken / 1e12, 2),
             "us": [round(1e6 * present, 2), round(1e6 * best, 2)], "offered": len(found)}  # fmt: skip
    if wins:
        entry["algorithm"] = code
    return entry


def _named(library: Any, x: Any, code: str, out: Any, weight: Any) -> Any:
    return library.product(x, weight, code, out)


def _right(library: Any, x: Any, weight: Any, code: str) -> bool:
    """Whether it computes the product at all: a wrong one must not win."""
    import torch

    got = library.product(x, weight, code)
    if got is None:
        return False
    want = torch.mm(x[:64], weight.t())
    return bool(((got[:64] - want).abs().max() <= 0.02 * want.abs().max()).item())


def _present(held: dict[str, Any], x: Any, out: Any) -> Callable[[Any], Any]:
    """What the table takes so far."""
    import torch

    from quire.kernels.triton import linear_few

    if held["kernel"] == "strip":
        sizes = linear_few.StripShape(*held["sizes"])
        return lambda weight: linear_few.linear_strip(x, weight, sizes=sizes, out=out)
    if held["kernel"] == "vector":
        return lambda weight: linear_few.linear_vector(x, weight, out=out)
    return lambda weight: torch.mm(x, weight.t(), out=out)
