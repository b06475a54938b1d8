"""Times GEMMs that prefetch or stream their weights against the kernels in the GEMM table, and adds the winners to it.

A GEMM is timed behind a norm, as in a decode step: its gain over the library is that it starts while the norm still
runs. Kernels are compiled beforehand by one process per weight.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from quire.bench.gpu.tune import graph_seconds, weights_of, write
from quire.child import child_environment, module_command

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128)
_SHARED, _TURN = 218_000, 48 << 10
_MOST_STAGES = 16
_MULTIPROCESSORS, _LEAST_GROUPS = 132, 40
_LEAST_BYTES = 2e8
_LEAST_GAIN, _CHAIN_GAIN, _CHAIN_ROWS = 1.02, 0.955, 64
"""What it must gain. Up to `_CHAIN_ROWS` rows it may even lose a little: after a GEMM of the library the next one
cannot prefetch, a cost that this bench does not measure."""
_STREAMS = {
    "plain": ((16, 64, 8, 1, 4, 2), (16, 64, 16, 1, 4, 0), (16, 64, 4, 1, 4, 4), (16, 32, 8, 1, 4, 3)),
    "norm": ((16, 32, 8, 1, 4, 2), (16, 64, 16, 1, 2, 1), (16, 32, 4, 1, 4, 4), (32, 32, 8, 1, 4, 2)),
    "gated": ((16, 32, 8, 1, 4, 2), (16, 32, 16, 1, 4, 1), (16, 64, 8, 3, 2, 1), (16, 32, 4, 1, 4, 4)),
}  # fmt: skip
_KEPT = ("rows", "features", "width", "form", "kernel", "sizes", "TB/s", "us")


def rings_of(features: int, width: int, rows: int, element: int = 2) -> Iterator[tuple[int, ...]]:
    """What `PrefetchShape` may be: a program for each group of tiles, or equal shares of all tiles. Few, so that GEMMs
    share compiled kernels: how many slabs a turn should have was measured (8 rows of 6,144 x 4,096: 15.8 us with 4
    slabs, 16.9 with 2; 64 rows: 18.0 and 17.5). Widths that these do not fill have the nearest that do."""
    from quire.kernels.triton.linear_prefetch import FEATURES, MOST_SUMS, SLAB, PrefetchShape, padded

    tiles = math.ceil(features / FEATURES)
    group = math.ceil(tiles / _MULTIPROCESSORS)
    for held, programs in ((group, 0), (1, 1)):
        slab = (held * FEATURES + padded(rows)) * SLAB
        most = _TURN if held == 1 else _SHARED // 3
        slabs = max(count for count in (1, 2, 4) if count == 1 or count * slab <= most)
        stages = min(_MOST_STAGES, _SHARED // (slab * slabs))
        few = programs == 0 and math.ceil(tiles / held) < _LEAST_GROUPS
        if not few and held * padded(rows) <= MOST_SUMS and stages >= 3:
            ring = PrefetchShape(held, stages, slabs, programs).in_turns_of(width * element // SLAB)
            if width * element % (ring.slabs * SLAB) == 0:
                yield dataclasses.astuple(ring)


def streams_of(form: str, features: int, width: int) -> Iterator[tuple[int, ...]]:
    """What `StreamShape` may be: few, each of which keeps some 30 KB on their way to a multiprocessor."""
    from quire.kernels.triton.linear_stream import StreamShape, fits

    for shape in _STREAMS[form]:
        if fits(1, features, width, StreamShape(*shape), form == "gated"):
            yield shape


def tune(
    models: list[str], path: str, note: Callable[[dict[str, Any]], None], rows: list[int] | None = None
) -> None:
    counts = rows or ROWS
    jobs = [(model, index) for model in models for index in range(len(weights_of(model)))]
    here = module_command("quire.bench.gpu.tune_prefetch")
    compiling = [subprocess.Popen([*here, model, str(index), *map(str, counts)], env=child_environment())
                 for model, index in jobs]
    for process in compiling:
        process.wait()
    entries = []
    for model, index in jobs:
        for entry in _weight(model, index, counts, dry=False):
            note(entry)
            if entry["wins"]:
                entries.append({key: entry[key] for key in _KEPT})
        write(path, entries)


def _weight(model: str, index: int, counts: Iterable[int], dry: bool) -> Iterator[dict[str, Any]]:
    import torch

    from quire.kernels.triton.linear_prefetch import PrefetchScratch
    from quire.ops.triton import TritonOps

    form, features, width = weights_of(model)[index]
    ops = TritonOps("cuda", torch.bfloat16, pdl=True)
    scratch = PrefetchScratch.allocate("cuda")
    copies = 1 if dry else max(2, math.ceil(_LEAST_BYTES / (features * width * 2)))
    weights = [ops.pack_linear(torch.randn(features, width, device="cuda", dtype=ops.dtype)) for _ in range(copies)]
    for rows in counts:
        seconds = {}
        around = _Around(ops, rows, width, features, form if rows == 1 else "plain")
        for name, gemm in _ways(scratch, around, weights[0]):
            try:
                if not dry and not around.right(gemm, weights[0]):
                    raise ArithmeticError("the gemm is wrong")
                seconds[name] = graph_seconds([partial(around, gemm, w) for w in weights], dry)
            except Exception as error:
                print(f"{name} on {features} x {width}, {rows} rows: {error!r}"[:300], file=sys.stderr)
        if not dry and "now" in seconds and len(seconds) > 1:
            yield _entry(ops, rows, features, width, around.form, seconds)


class _Around:
    """A GEMM with what is next to it in a decode step: the norm before it; at one row also gate or residual."""

    def __init__(self, ops: Any, rows: int, width: int, features: int, form: str) -> None:
        import torch

        self.ops, self.form, self.one = ops, form, rows == 1
        self.x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self.gain = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)

    def __call__(self, gemm: Callable[..., Any] | None, weight: Any) -> Any:
        from quire.kernels.triton import norm

        gated = "silu" if self.form == "gated" else None
        if isinstance(gemm, _Stream):
            fused = {"norm": self.gain, "eps": 1e-6} if self.one and self.form != "plain" else {}
            if fused or (self.one and self.form == "plain"):
                return gemm(self.x, weight, None if fused else self.residual, gated=gated, **fused)
        if gemm is None and self.one:
            if self.form == "plain":
                return self.ops.linear(self.x, weight, self.residual)
            return self.ops.norm_linear(self.x, self.gain, 1e-6, weight, gated)
        if self.one and self.form == "plain":
            return gemm(self.x, weight, self.residual)  # type: ignore[misc]
        normed = norm.rms_norm(self.x, self.gain, 1e-6, pdl=True)
        found = self.ops.linear(normed, weight) if gemm is None else gemm(normed, weight, None)
        return self.ops.act_mul(found, gated) if gated else found

    def right(self, gemm: Callable[..., Any] | None, weight: Any) -> bool:
        """Whether it computes the GEMM at all: a wrong one must not win."""
        got, want = self(gemm, weight).float(), self(None, weight).float()
        return bool(((got - want).abs().max() <= 0.02 * want.abs().max()).item())


def _ways(scratch: Any, around: _Around, w: Any) -> Iterator[tuple[str, Callable[..., Any] | None]]:
    """(name, gemm of x, weight and residual): as it is now, and by every shape."""
    from quire.kernels.triton.linear_prefetch import PrefetchShape, fits
    from quire.kernels.triton.linear_stream import MOST_ROWS, StreamShape

    yield "now", None
    for shape in rings_of(w.out_features, w.in_features, around.x.shape[0]):
        sizes = PrefetchShape(*shape)
        if fits(around.x, w.weight, sizes, scratch):
            yield _named("prefetch", shape), partial(_gemm, sizes, scratch)
    if around.x.shape[0] <= MOST_ROWS:
        for shape in streams_of(around.form, w.out_features, w.in_features):
            yield _named("stream", shape), _Stream(StreamShape(*shape))


def _named(kernel: str, shape: tuple[int, ...]) -> str:
    return " ".join(map(str, (kernel, *shape)))


class _Stream:
    """A GEMM by `linear_stream`, which takes the norm before and the gate after it along."""

    def __init__(self, sizes: Any) -> None:
        self._sizes = sizes

    def __call__(self, x: Any, weight: Any, residual: Any, **fused: Any) -> Any:
        from quire.kernels.triton.linear_stream import linear_stream

        return linear_stream(x, weight.weight, None, residual, sizes=self._sizes, pdl=True, **fused)


def _gemm(sizes: Any, scratch: Any, x: Any, weight: Any, residual: Any) -> Any:
    from quire.kernels.triton.linear_prefetch import linear_prefetch

    return linear_prefetch(x, weight.weight, None, residual, sizes=sizes, scratch=scratch, pdl=True)


def _entry(
    ops: Any, rows: int, features: int, width: int, form: str, seconds: dict[str, float]
) -> dict[str, Any]:
    from quire.kernels.triton import gemm_table

    now = seconds.pop("now")
    first = sorted(seconds.items(), key=lambda item: item[1])
    name, best = first[0]
    kernel, *sizes = name.split()
    held = gemm_table.lookup(rows, features, width, ops.dtype, form)
    wins = now / best >= (_CHAIN_GAIN if 1 < rows <= _CHAIN_ROWS else _LEAST_GAIN)
    return {"rows": rows, "features": features, "width": width, "form": form,
            "kernel": kernel, "sizes": [int(word) for word in sizes],
            "TB/s": round(features * width * 2 / best / 1e12, 2), "wins": wins,
            "us": [round(1e6 * now, 2), round(1e6 * best, 2)], "was": held.kernel + held.algorithm[:8],
            "next": {key: round(1e6 * value, 2) for key, value in first[1:6]}}  # fmt: skip


if __name__ == "__main__":
    list(_weight(sys.argv[1], int(sys.argv[2]), map(int, sys.argv[3:]), dry=True))
