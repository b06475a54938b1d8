"""`python -m quire.bench.gpu.tune_fixed --models 0.6b`: GEMMs of deterministic mode by every kernel that might serve.

Of each kernel: does it give the bits of `linear_fixed` (without slices: by its smallest tile), and how long does it
take? A JSON line for each weight and number of rows. "fixed" is what `linear_fixed` chooses itself, "fixed ROWS
FEATURES DEPTH WARPS STAGES" a tile, with slices "in PARTS" programs that share them. cuBLAS's algorithms are tried too:
those that split no sum may add in the same order.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from quire.bench.gpu.cases import MODELS
from quire.bench.gpu.tune import graph_seconds, weights_of

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)
_SHAPES = ((64, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3))
_HEADS = (
    (64, 32, 128, 4, 3, 1), (128, 32, 128, 8, 3, 1), (128, 64, 128, 8, 3, 8), (128, 128, 128, 8, 2, 16),
)
_RANGES = (
    (128, 64, 64, 8, 4, 1), (128, 128, 64, 8, 4, 4), (128, 128, 64, 8, 4, 8), (128, 256, 64, 8, 3, 8),
)  # fmt: skip
"""Tiles of sums in slices, and into how many runs the slices of a tile are shared out: the longer a run, the more sums
a program holds in registers; the more runs, the more of them go through memory. The first of each is the one in use."""
_LEAST_BYTES, _HEAD_FEATURES, _HEAD_ROWS = 2e8, 100_000, 256
_FIRST_ALGORITHMS, _TILE_ROWS = 6, 64
Way = Callable[[Any], Any]


def measure(model: str, counts: list[int]) -> Iterator[dict[str, Any]]:
    import torch

    for index, (_, features, width) in enumerate(weights_of(model)):
        slices = _slices(model, index)
        copies = max(2, math.ceil(_LEAST_BYTES / (features * width * 2)))
        weights = [torch.randn(features, width, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(copies)]
        for rows in counts:
            if rows <= _HEAD_ROWS or features < _HEAD_FEATURES:
                x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
                yield {"bench": "gpu", "case": "fixed", "model": model, "features": features, "width": width,
                       "rows": rows, "slices": 1 if slices is None else slices.total,
                       "ways": _timed(x, weights[: 2 if rows >= 1024 else copies], slices)}


def _slices(model: str, index: int) -> Any:
    """The output projection sums by heads, the MLP's second GEMM by ranges."""
    from quire.kernels.slices import Slices

    config = MODELS[model]
    if index == 1:
        return Slices.of_heads(config["num_attention_heads"], config["head_dim"])
    return Slices.of_width(config["intermediate_size"]) if index == 3 and "num_experts" not in config else None


def _timed(x: Any, weights: list[Any], slices: Any) -> dict[str, Any]:
    """By name: microseconds, and what share of its elements has the bits of `linear_fixed`."""
    import torch

    from quire.kernels.triton.linear_fixed import FixedShape, linear_fixed

    want = linear_fixed(x, weights[0], slices=slices, sizes=FixedShape() if slices is None else None)
    found: dict[str, Any] = {}
    for name, way in _ways(x, weights[0], slices):
        try:
            same = (way(weights[0]).view(torch.int16) == want.view(torch.int16)).float().mean().item()
            seconds = graph_seconds([partial(way, weight) for weight in weights], repeats=3)
            found[name] = {"us": round(1e6 * seconds, 2), "same": round(same, 5)}
        except Exception as error:
            print(f"{name}, {x.shape[0]} rows of {tuple(weights[0].shape)}: {error!r}"[:300], file=sys.stderr)
    return found


def _ways(x: Any, weight: Any, slices: Any) -> Iterator[tuple[str, Way]]:
    from quire.kernels.triton import fixed_prefetch
    from quire.kernels.triton.linear_fixed import FixedShape, linear_fixed
    from quire.kernels.triton.linear_prefetch import PrefetchScratch

    yield "fixed", lambda w: linear_fixed(x, w, slices=slices)
    scratch = PrefetchScratch.allocate("cuda")
    units = fixed_prefetch.units_for(x.shape[0], weight, slices)
    if units is not None and units.fits(x, weight, scratch):
        for name, early in (("prefetch", False), ("prefetch early", True)):
            yield name, partial(_prefetched, x, units, scratch, early)
    for *sizes, parts in tiles_for(x.shape[0], slices):
        name = " ".join(map(str, ("fixed", *sizes, *(() if slices is None else ("in", parts)))))
        yield name, partial(_shaped, x, slices, FixedShape(*sizes), parts)
    if slices is None:
        yield from _library(x, weight)


def tiles_for(rows: int, slices: Any) -> tuple[tuple[int, ...], ...]:
    """Tiles for more than a few rows, each with its number of parts, if those are nodes of the slices' tree."""
    if rows < _TILE_ROWS:
        return ()
    if slices is None:
        return tuple((*sizes, 1) for sizes in _SHAPES)
    return tuple(tile for tile in (_HEADS if slices.longest <= _HEADS[0][2] else _RANGES)
                 if tile[-1] == 1 or is_shared_evenly(slices.total, tile[-1]))


def is_shared_evenly(count: int, parts: int) -> bool:
    """Whether `count` slices fall into so many equal runs that are nodes of their tree."""
    run, rest = divmod(count, parts)
    return rest == 0 and run & (run - 1) == 0


def _prefetched(x: Any, units: Any, scratch: Any, early: bool, weight: Any) -> Any:
    from quire.kernels.triton.fixed_prefetch import linear_fixed_prefetch

    return linear_fixed_prefetch(x, weight, None, None, units=units, scratch=scratch, pdl=early)


def _shaped(x: Any, slices: Any, sizes: Any, parts: int, weight: Any) -> Any:
    from quire.kernels.triton.linear_fixed import linear_fixed

    return linear_fixed(x, weight, slices=slices, sizes=sizes, parts=parts)


def _library(x: Any, weight: Any) -> Iterator[tuple[str, Way]]:
    import torch

    from quire.kernels.cublas import CublasLt

    yield "torch", lambda w: torch.mm(x, w.t())
    library = CublasLt(x.device, torch.bfloat16)
    features, width = weight.shape
    offered = library.candidates(x.shape[0], features, width, _FIRST_ALGORITHMS)
    for number, candidate in enumerate(offered):
        yield f"algorithm {number}", partial(_named, library, x, candidate.code)
    library.close()


def _named(library: Any, x: Any, code: str, weight: Any) -> Any:
    return library.gemm(x, weight, code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6b"], choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    args = parser.parse_args()
    for model in args.models:
        for line in measure(model, args.rows):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
