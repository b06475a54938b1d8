"""Times products split over columns against what the table of products takes so far, and adds the winners to it.

A product is timed behind a norm, as in a decode step: what counts is when the next one may begin, and that it starts
while the norm still ends is most of what a kernel of our own has over the library's. Kernels are compiled beforehand by
one process per weight.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from quire.bench.gpu_tune import graph_seconds, weights_of, write

ROWS = (2, 4, 8, 16, 32, 48, 64)
SIZES = ((64, 128, 4, 4), (64, 64, 4, 6), (64, 256, 4, 2), (128, 64, 4, 5), (128, 128, 8, 3), (128, 128, 4, 3),
         (32, 128, 4, 5))  # fmt: skip
_PARTS = (1, 2, 4, 8)
_PROGRAMS = (96, 800)
_LEAST_BYTES = 2e8
_LEAST_GAIN = 1.01
_KEPT = ("rows", "features", "width", "form", "kernel", "sizes", "TB/s", "us")


def shapes_of(features: int, width: int, rows: int) -> Iterator[tuple[int, ...]]:
    """What `SplitShape` may be to fill the chip and fit its shared memory."""
    pad = max(16, 1 << (rows - 1).bit_length())
    for strip, columns, warps, stages in SIZES:
        if stages * (strip + pad) * columns * 2 > 220_000:
            continue
        for parts in _PARTS:
            programs = math.ceil(features / strip) * parts
            if _PROGRAMS[0] <= programs <= _PROGRAMS[1] and width % (parts * columns) == 0:
                yield strip, columns, warps, stages, parts


def tune(models: list[str], path: str, note: Callable[[dict[str, Any]], None]) -> None:
    jobs = [(model, index) for model in models for index in range(4)]
    here = [sys.executable, "-m", "quire.bench.gpu_tune_split"]
    compiling = [subprocess.Popen([*here, model, str(index)]) for model, index in jobs]
    for process in compiling:
        process.wait()
    entries = []
    for model, index in jobs:
        for entry in _weight(model, index, dry=False):
            note(entry)
            if entry["wins"]:
                entries.append({key: entry[key] for key in _KEPT})
        write(path, entries)


def _weight(model: str, index: int, dry: bool) -> Iterator[dict[str, Any]]:
    import torch

    from quire.kernels.triton.linear_split import SplitScratch
    from quire.kernels.triton.ops import TritonOps

    _, features, width = weights_of(model)[index]
    ops = TritonOps("cuda", torch.bfloat16, pdl=True)
    scratch = SplitScratch.allocate("cuda")
    copies = 1 if dry else max(2, math.ceil(_LEAST_BYTES / (features * width * 2)))
    weights = [ops.pack_linear(torch.randn(features, width, device="cuda", dtype=ops.dtype)) for _ in range(copies)]
    for rows in (2, 32, 64) if dry else ROWS:
        seconds = {}
        for name, call in _ways(ops, scratch, rows, weights[0]):
            try:
                seconds[name] = graph_seconds([partial(call, w) for w in weights], dry)
            except Exception as error:
                print(f"{name} on {features} x {width}, {rows} rows: {error!r}"[:300], file=sys.stderr)
        if not dry and "now" in seconds and len(seconds) > 1:
            yield _entry(ops, rows, features, width, seconds)


def _ways(ops: Any, scratch: Any, rows: int, w: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Norm, then the product: as it is now, and by every shape."""
    import torch

    from quire.kernels.triton import norm
    from quire.kernels.triton.linear_split import SplitShape, linear_split

    x = torch.randn(rows, w.in_features, device="cuda", dtype=torch.bfloat16)
    gain = torch.ones(w.in_features, device="cuda")

    def now(weight: Any) -> Any:
        return ops.linear(norm.rms_norm(x, gain, 1e-6, pdl=True), weight)

    yield "now", now
    for shape in shapes_of(w.out_features, w.in_features, rows):
        sizes = SplitShape(*shape)

        def split(weight: Any, sizes: SplitShape = sizes) -> Any:
            rowed = norm.rms_norm(x, gain, 1e-6, pdl=True)
            return linear_split(rowed, weight.weight, sizes=sizes, scratch=scratch, pdl=True)

        yield " ".join(map(str, shape)), split


def _entry(
    ops: Any, rows: int, features: int, width: int, seconds: dict[str, float]
) -> dict[str, Any]:
    from quire.kernels.triton import choices

    now = seconds.pop("now")
    first = sorted(seconds.items(), key=lambda item: item[1])
    name, best = first[0]
    held = choices.product(rows, features, width, ops.dtype)
    wins = now / best >= _LEAST_GAIN
    return {"rows": rows, "features": features, "width": width, "form": "plain",
            "kernel": "split", "sizes": [int(word) for word in name.split()],
            "TB/s": round(features * width * 2 / best / 1e12, 2), "wins": wins,
            "us": [round(1e6 * now, 2), round(1e6 * best, 2)], "was": held.kernel + held.algorithm[:8],
            "next": {key: round(1e6 * value, 2) for key, value in first[1:6]}}  # fmt: skip


if __name__ == "__main__":
    list(_weight(sys.argv[1], int(sys.argv[2]), dry=True))
