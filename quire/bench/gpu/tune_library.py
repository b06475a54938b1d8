"""Times the algorithms that cuBLASLt offers for a model's GEMMs and adds the winners to the GEMM table.

The library's heuristic offers eight algorithms for a GEMM and puts one of them first. Where another is faster by
`_LEAST_GAIN` than that and than our kernels (which the table knows already), the table names it. Up to `_WIDE_ROWS`
rows, where it errs most, all that it offers for any GEMM of these models is tried on every one, also in parts.
Timed in captured graphs over weights too large for the cache, as `quire.bench.gpu.tune` does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.gpu.tune import graph_seconds, graphs_seconds, weights_of, write

ROWS = (2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 512, 1024, 2048, 4096, 8192,
        16384)  # fmt: skip
_LEAST_ROWS, _WIDE_ROWS = 16, 256
_PARTS = (2, 3, 4)
_HEAD_ROWS = 256
"""More rows than this never meet the output layer."""
_LEAST_BYTES = 2e8
_LEAST_GAIN = 1.015
_FINALISTS = 4


def tune(models: list[str], path: str, note: Callable[[dict[str, Any]], None], rows: tuple[int, ...] = ROWS) -> None:
    from quire.kernels import cublas

    known = json.loads(Path(path).read_text(encoding="utf-8"))["gemms"] if Path(path).exists() else []
    before = {(e["rows"], e["features"], e["width"]): e for e in known if e["form"] == "plain"}
    weights = list(dict.fromkeys((features, width) for model in models for _, features, width in weights_of(model)))
    known_codes = _offered(weights, rows)
    note({"algorithms": len(known_codes)})
    entries = []
    for features, width in weights:
        for entry in _weight(features, width, rows, before, known_codes):
            note({key: value for key, value in entry.items() if key != "algorithm"})
            entries.append(entry)
        write(path, entries, cublas.version())


def _offered(weights: list[tuple[int, int]], counts: tuple[int, ...]) -> list[str]:
    """Every algorithm that the library offers for any of the GEMMs of a batch."""
    import torch

    from quire.kernels.cublas import CublasLt

    library = CublasLt(torch.device("cuda"), torch.bfloat16)
    rows = [count for count in counts if _LEAST_ROWS <= count <= 2 * _WIDE_ROWS]
    sizes = [(count, *weight) for count in rows for weight in weights]
    found = [candidate.code for size in sizes for candidate in library.candidates(*size)]
    library.close()
    return list(dict.fromkeys(found))


def _weight(
    features: int,
    width: int,
    counts: tuple[int, ...],
    before: dict[tuple[int, int, int], dict[str, Any]],
    pool: list[str],
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
        if held["kernel"] == "prefetch":
            continue  # timed with what is around it, which this is not
        try:
            wide = pool if _LEAST_ROWS <= rows <= _WIDE_ROWS and features < 100_000 else []
            entries.append(_timed(library, weights, rows, held, wide))
        except Exception as error:  # one GEMM that cannot be timed must not lose the others
            print(f"{rows} rows of {features} x {width}: {error!r}", flush=True)
    library.close()
    return entries


def _timed(library: Any, weights: list[Any], rows: int, held: dict[str, Any], pool: list[str]) -> dict[str, Any]:
    """The table's entry: who wins, and by how much."""
    import torch

    features, width = weights[0].shape
    x = torch.randn(rows, width, device=weights[0].device, dtype=torch.bfloat16)
    out = torch.empty(rows, features, device=x.device, dtype=x.dtype)
    used = weights[: 2 if rows >= 1024 else len(weights)]

    def seconds(call: Callable[[Any], Any], repeats: int) -> float:
        return graph_seconds([partial(call, weight) for weight in used], repeats=repeats)

    now = _present(held, x, out)
    codes = [c.code for c in library.candidates(rows, features, width)] + pool
    codes += [library.in_parts(code, parts) for code in pool for parts in _PARTS]
    found = [code for code in dict.fromkeys(codes) if library.fits(rows, features, width, code)]
    first = sorted((seconds(partial(_named, library, x, code, out), 1), code) for code in found)
    right = (code for _, code in first if _right(library, x, used[0], code))
    finals = [code for _, code in zip(range(_FINALISTS), right, strict=False)]
    ways: list[Callable[[Any], Any]] = [now, *(partial(_named, library, x, code, out) for code in finals)]
    present, *others = graphs_seconds([[partial(way, weight) for weight in used] for way in ways])
    best, code = min(zip(others, finals, strict=True), default=(math.inf, ""))
    wins = present / best >= _LEAST_GAIN
    taken = min(best, present) if wins else present
    entry = {"rows": rows, "features": features, "width": width, "form": "plain", "kernel": held["kernel"],
             "sizes": held.get("sizes", []), "TB/s": round(features * width * 2 / taken / 1e12, 2),
             "us": [round(1e6 * present, 2), round(1e6 * best, 2)]}  # fmt: skip
    if wins:
        entry["algorithm"] = code
    return entry


def _named(library: Any, x: Any, code: str, out: Any, weight: Any) -> Any:
    return library.gemm(x, weight, code, out)


def _right(library: Any, x: Any, weight: Any, code: str) -> bool:
    """Whether it computes the GEMM at all: a wrong one must not win."""
    import torch

    got = library.gemm(x, weight, code)
    if got is None:
        return False
    want = torch.mm(x[:64], weight.t())
    return bool(((got[:64] - want).abs().max() <= 0.02 * want.abs().max()).item())


def _present(held: dict[str, Any], x: Any, out: Any) -> Callable[[Any], Any]:
    """What the table takes so far."""
    import torch

    from quire.kernels.triton import linear_few

    if held["kernel"] == "vector":
        return lambda weight: linear_few.linear_vector(x, weight, out=out)
    return lambda weight: torch.mm(x, weight.t(), out=out)
