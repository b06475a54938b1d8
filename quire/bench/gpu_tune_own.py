"""Times products of our own (split over columns, or asking ahead for their weights) against what the table of products
takes so far, and adds the winners to it.

A product is timed behind a norm, as in a decode step: what counts is when the next one may begin, and that it starts
while the norm still ends is most of what a kernel of our own has over the library's. Kernels are compiled beforehand by
one process per weight.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from quire.bench.gpu_tune import graph_seconds, weights_of, write

_FEW = (2, 4, 8, 16, 32, 48, 64)
ROWS = {"split": _FEW, "ahead": (1, *_FEW, 80, 96, 112, 128)}
_SHARED = 218_000
_MOST_STAGES = 16
_MOST_HELD = 5
_MULTIPROCESSORS, _LEAST_GROUPS = 132, 40
_HEAD = 100_000
"""Features: more has only the output layer, which is too large to be split."""
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


def rings_of(features: int, width: int, rows: int) -> Iterator[tuple[int, ...]]:
    """What `AheadShape` may be: a program for each group of tiles, one or two of them on a multiprocessor, or equal
    shares of all tiles; in any case a ring that fills the shared memory."""
    from quire.kernels.triton.linear_ahead import COLUMNS, FEATURES, padded

    tiles = math.ceil(features / FEATURES)
    groups = [math.ceil(tiles / (_MULTIPROCESSORS * beside)) for beside in (1, 2)]
    for beside, group in zip((1, 2), groups, strict=True):
        ways = [(group, slabs, 0) for slabs in ((2, 4) if group == 1 else (1, 2))]
        if math.ceil(tiles / group) < _LEAST_GROUPS or (beside == 2 and group == groups[0]):
            ways = []
        if beside == 1:
            ways += [(1, slabs, 1) for slabs in (2, 4)]
        for held, slabs, programs in ways:
            turn = (held * FEATURES + padded(rows)) * slabs * COLUMNS * 2
            stages = min(_MOST_STAGES, _SHARED // beside // turn)
            if held <= _MOST_HELD and stages >= 3 and width % (slabs * COLUMNS) == 0:
                yield held, stages, slabs, programs


def tune(
    models: list[str], path: str, note: Callable[[dict[str, Any]], None], kernel: str, rows: list[int] | None = None
) -> None:
    """`kernel`: "split" or "ahead"; `rows`: all that it may serve."""
    counts = rows or ROWS[kernel]
    jobs = [(model, index) for model in models for index in range(5)]
    here = [sys.executable, "-m", "quire.bench.gpu_tune_own", kernel]
    compiling = [subprocess.Popen([*here, model, str(index), *map(str, counts)]) for model, index in jobs]
    for process in compiling:
        process.wait()
    entries = []
    for model, index in jobs:
        for entry in _weight(kernel, model, index, counts, dry=False):
            note(entry)
            if entry["wins"]:
                entries.append({key: entry[key] for key in _KEPT})
        write(path, entries)


def _weight(kernel: str, model: str, index: int, counts: Iterable[int], dry: bool) -> Iterator[dict[str, Any]]:
    import torch

    from quire.kernels.triton.linear_split import SplitScratch
    from quire.kernels.triton.ops import TritonOps

    form, features, width = weights_of(model)[index]
    ops = TritonOps("cuda", torch.bfloat16, pdl=True)
    scratch = SplitScratch.allocate("cuda")
    copies = 1 if dry else max(2, math.ceil(_LEAST_BYTES / (features * width * 2)))
    weights = [ops.pack_linear(torch.randn(features, width, device="cuda", dtype=ops.dtype)) for _ in range(copies)]
    for rows in counts:
        seconds = {}
        around = _Around(ops, rows, width, features, form if rows == 1 else "plain")
        for name, product in _ways(kernel, scratch, rows, weights[0]):
            try:
                if not dry and not around.right(product, weights[0]):
                    raise ArithmeticError("the product is wrong")
                seconds[name] = graph_seconds([partial(around, product, w) for w in weights], dry)
            except Exception as error:
                print(f"{name} on {features} x {width}, {rows} rows: {error!r}"[:300], file=sys.stderr)
        if not dry and "now" in seconds and len(seconds) > 1:
            yield _entry(ops, rows, features, width, around.form, seconds)


class _Around:
    """A product with what is next to it in a decode step: the norm before it; at one row also gate or residual."""

    def __init__(self, ops: Any, rows: int, width: int, features: int, form: str) -> None:
        import torch

        self.ops, self.form, self.one = ops, form, rows == 1
        self.x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self.gain = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)

    def __call__(self, product: Callable[..., Any] | None, weight: Any) -> Any:
        from quire.kernels.triton import norm

        gated = "silu" if self.form == "gated" else None
        if product is None and self.one:
            if self.form == "plain":
                return self.ops.linear(self.x, weight, self.residual)
            return self.ops.norm_linear(self.x, self.gain, 1e-6, weight, gated)
        if self.one and self.form == "plain":
            return product(self.x, weight, self.residual)  # type: ignore[misc]
        normed = norm.rms_norm(self.x, self.gain, 1e-6, pdl=True)
        found = self.ops.linear(normed, weight) if product is None else product(normed, weight, None)
        return self.ops.act_mul(found, gated) if gated else found

    def right(self, product: Callable[..., Any] | None, weight: Any) -> bool:
        """Whether it computes the product at all: a wrong one must not win."""
        got, want = self(product, weight).float(), self(None, weight).float()
        return bool(((got - want).abs().max() <= 0.02 * want.abs().max()).item())


def _ways(kernel: str, scratch: Any, rows: int, w: Any) -> Iterator[tuple[str, Callable[..., Any] | None]]:
    """(name, product of x, weight and residual): as it is now, and by every shape."""
    from quire.kernels.triton.linear_ahead import AheadShape, linear_ahead
    from quire.kernels.triton.linear_split import SplitShape, linear_split

    yield "now", None
    if kernel == "ahead":
        for shape in rings_of(w.out_features, w.in_features, rows):
            yield _named(kernel, shape), partial(_product, linear_ahead, AheadShape(*shape), scratch)
    elif w.out_features < _HEAD:
        for shape in shapes_of(w.out_features, w.in_features, rows):
            yield _named(kernel, shape), partial(_product, linear_split, SplitShape(*shape), scratch)


def _named(kernel: str, shape: tuple[int, ...]) -> str:
    return " ".join([kernel, *map(str, shape)])


def _product(kernel: Any, sizes: Any, scratch: Any, x: Any, weight: Any, residual: Any) -> Any:
    return kernel(x, weight.weight, residual=residual, sizes=sizes, scratch=scratch, pdl=True)


def _entry(
    ops: Any, rows: int, features: int, width: int, form: str, seconds: dict[str, float]
) -> dict[str, Any]:
    from quire.kernels.triton import choices

    now = seconds.pop("now")
    first = sorted(seconds.items(), key=lambda item: item[1])
    name, best = first[0]
    kernel, *sizes = name.split()
    held = choices.product(rows, features, width, ops.dtype, form)
    wins = now / best >= _LEAST_GAIN
    return {"rows": rows, "features": features, "width": width, "form": form,
            "kernel": kernel, "sizes": [int(word) for word in sizes],
            "TB/s": round(features * width * 2 / best / 1e12, 2), "wins": wins,
            "us": [round(1e6 * now, 2), round(1e6 * best, 2)], "was": held.kernel + held.algorithm[:8],
            "next": {key: round(1e6 * value, 2) for key, value in first[1:6]}}  # fmt: skip


if __name__ == "__main__":
    list(_weight(sys.argv[1], sys.argv[2], int(sys.argv[3]), map(int, sys.argv[4:]), dry=True))
