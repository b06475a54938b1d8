"""`python -m quire.bench.gpu.tune_fixed --models 0.6b`: GEMMs of deterministic mode by every kernel that might serve.

Of each kernel: does it give the bits of `linear_fixed` (without slices: by its smallest tile), and how long does it
take? A JSON line for each weight and number of rows. "fixed" is what `linear_fixed` chooses itself, "fixed ROWS
FEATURES DEPTH WARPS STAGES" a tile, with slices "in PARTS" programs that share them; "tiles FEATURES STAGES PARTS
ORDERED BAND" is `fixed_tiles`, "wide" and the sizes of `WideShape` the GEMM in CUDA C. A second line of gate and up has
the gate in it, "apart" by the fastest GEMM and a kernel of its own, else by `wide`. cuBLAS's algorithms are tried too:
those that split no sum may add in the same order.

`--sustained SECONDS`: those that come within a fifth of the fastest are timed again, each in launches of so many
seconds, of which the second half counts: the clock falls under load, and by how much depends on the kernel.

`--write FILE`: the table that `quire.kernels.triton.fixed_table` reads, with the fastest of those that gave every bit.
cuBLAS is never in it, since nothing promises that it adds so. Kernels are compiled beforehand, by a process for each
weight.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.gpu.cases import MODELS
from quire.bench.gpu.fixed_wide_shapes import gated_shapes, wide_shapes
from quire.bench.gpu.tune import graph_seconds, sustained_seconds, weights_of
from quire.child import child_environment, module_command
from quire.kernels.triton.fixed_table import APART, FIXED, PREFETCH, TILES, WIDE, FixedChoice, write

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
_WHOLE_TILES = ((128, 6, 1, 0, 8), (128, 6, 1, 0, 16), (256, 4, 1, 0, 8), (256, 4, 1, 0, 16))
_HEAD_TILES = ((128, 5, 1, 0, 8), (128, 5, 1, 1, 8), (128, 5, 1, 1, 16), (128, 5, 2, 0, 8), (128, 5, 4, 0, 8))
_RANGE_TILES = ((128, 5, 1, 0, 8), (128, 5, 1, 0, 16), (128, 6, 2, 0, 8), (128, 6, 4, 0, 8))
"""Of `fixed_tiles`: features, stages, parts, whether warp groups take slices in turn, row tiles of a band."""
_MOST_SHARED_ROWS = 1024
"""With more rows than that there are tiles enough for all programs: slices are not shared out."""
_LEAST_BYTES, _HEAD_FEATURES, _HEAD_ROWS = 2e8, 100_000, 256
_FIRST_ALGORITHMS, _TILE_ROWS = 6, 64
_CLOSE = 1.2
"""How much longer than the fastest a way may take in a short run and yet be the fastest under load."""
_GATE_AND_UP = 2
_DEVICE = "cuda"
Way = Callable[[Any], Any]


def measure(
    model: str, counts: list[int], only: list[str], places: list[int], sustained: float = 0.0
) -> Iterator[dict[str, Any]]:
    """`only`: names of ways begin with one of these. `places`: of the weights to time."""
    import torch

    for index, (_, features, width) in enumerate(weights_of(model)):
        if index not in places:
            continue
        slices = _slices(model, index)
        copies = max(2, math.ceil(_LEAST_BYTES / (features * width * 2)))
        weights = [torch.randn(features, width, device=_DEVICE, dtype=torch.bfloat16) / 32 for _ in range(copies)]
        for rows in counts:
            if rows > _HEAD_ROWS and features >= _HEAD_FEATURES:
                continue
            x = torch.randn(rows, width, device=_DEVICE, dtype=torch.bfloat16)
            bench = Bench(x, weights[: 2 if rows >= 1024 else copies], slices, only, sustained)
            about = {"bench": "gpu", "case": "fixed", "model": model, "features": features, "width": width,
                     "rows": rows, "slices": 1 if slices is None else slices.total}
            ways = bench.gemm()
            yield {**about, "ways": ways}
            if index == _GATE_AND_UP and "num_experts" not in MODELS[model] and rows >= _TILE_ROWS:
                yield {**about, "gate": True, "ways": bench.gate(ways)}


def best(line: dict[str, Any]) -> dict[str, Any] | None:
    """The table's entry of what was timed: the fastest kernel of ours that gave all bits."""
    ours = _of_ours(line["ways"])
    if not ours:
        return None
    name = min(ours, key=lambda each: ours[each])
    chosen = line["ways"][name]
    before = line["ways"].get(APART if line.get("gate") else FIXED, {}).get("us")
    kept = ("rows", "features", "width", "slices", *(("gate",) if line.get("gate") else ()))
    return {**{key: line[key] for key in kept}, "kernel": chosen["kernel"], "sizes": chosen["sizes"],
            "us": [chosen["us"], before]}


def _of_ours(ways: dict[str, Any]) -> dict[str, float]:
    """Microseconds of what the table may name: kernels of ours that gave all bits."""
    return {name: way["us"] for name, way in ways.items() if "kernel" in way and way["same"] == 1.0}


def _slices(model: str, index: int) -> Any:
    """The output projection sums by heads, the MLP's second GEMM by ranges."""
    from quire.kernels.slices import Slices

    config = MODELS[model]
    if index == 1:
        return Slices.of_heads(config["num_attention_heads"], config["head_dim"])
    return Slices.of_width(config["intermediate_size"]) if index == 3 and "num_experts" not in config else None


class Bench:
    """One GEMM: x times any of `weights`. Ways are compared bit by bit with `linear_fixed`, then timed."""

    def __init__(self, x: Any, weights: list[Any], slices: Any, only: list[str], sustained: float) -> None:
        self.x, self.weights, self.slices, self.only, self.sustained = x, weights, slices, only, sustained
        self.ways: dict[str, Way] = {}

    def gemm(self) -> dict[str, Any]:
        """By name: microseconds, and what share of its elements has the same bits."""
        from quire.kernels.triton.linear_fixed import FixedShape, linear_fixed

        sizes = FixedShape() if self.slices is None else None
        want = linear_fixed(self.x, self.weights[0], slices=self.slices, sizes=sizes)
        wanted = ((name, choice, way) for name, choice, way in _ways(self.x, self.weights[0], self.slices)
                  if not self.only or name.startswith(tuple(self.only)))
        return self._timed(wanted, want)

    def gate(self, gemms: dict[str, Any]) -> dict[str, Any]:
        """The same with the gate; `gemms` is what the ways without it took."""
        from quire.kernels.triton.activation import act_mul
        from quire.kernels.triton.linear_fixed import FixedShape, linear_fixed

        ours = _of_ours(gemms)
        if not ours:
            return {}
        fastest = self.ways[min(ours, key=lambda name: ours[name])]
        want = act_mul(linear_fixed(self.x, self.weights[0], sizes=FixedShape()), "silu")
        apart = (APART, FixedChoice(APART), lambda w: act_mul(fastest(w), "silu", pdl=_DEVICE == "cuda"))
        shapes = gated_shapes(self.x.shape[0])
        return self._timed([apart, *_wide(self.x, self.weights[0], None, shapes, gated=True)], want)

    def _timed(self, ways: Iterable[tuple[str, FixedChoice | None, Way]], want: Any) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {}
        for name, choice, way in ways:
            try:
                same = (way(self.weights[0]).view(torch.int16) == want.view(torch.int16)).double().mean().item()
                seconds = graph_seconds(self._calls(way), repeats=3)
            except Exception as error:
                about = f"{name}, {self.x.shape[0]} rows of {tuple(self.weights[0].shape)}"
                print(f"{about}: {error!r}"[:300], file=sys.stderr)
                continue
            self.ways[name] = way
            # Rounded down: only what is the same in every element is 1.
            found[name] = {"us": round(1e6 * seconds, 2), "same": math.floor(same * 1e5) / 1e5}
            if choice is not None:
                found[name] |= {"kernel": choice.kernel, "sizes": list(choice.sizes)}
        if self.sustained:
            self._time_under_load(found)
        return found

    def _time_under_load(self, found: dict[str, Any]) -> None:
        """Replaces the times of the fastest of ours and of what is as fast; others are out of the race."""
        most = _CLOSE * min(_of_ours(found).values(), default=0.0)
        for name, way in found.items():
            way["short_us"] = way["us"]
            if way["us"] <= most:
                way["us"] = round(1e6 * sustained_seconds(self._calls(self.ways[name]), self.sustained), 2)
            else:
                way.pop("kernel", None)

    def _calls(self, way: Way) -> list[Callable[[], Any]]:
        return [partial(way, weight) for weight in self.weights]


def _ways(x: Any, weight: Any, slices: Any) -> Iterator[tuple[str, FixedChoice | None, Way]]:
    """Name, what the table may say of it (None: nothing), and what runs it."""
    from quire.kernels.triton.fixed_prefetch import FEW_ROWS
    from quire.kernels.triton.linear_fixed import FixedShape, linear_fixed

    few = x.shape[0] <= FEW_ROWS
    yield "fixed", FixedChoice(FIXED), lambda w: linear_fixed(x, w, slices=slices)
    yield from _prefetching(x, weight, slices)
    for *sizes, parts in tiles_for(x.shape[0], slices):
        name = " ".join(map(str, (FIXED, *sizes, *(() if slices is None else ("in", parts)))))
        yield name, FixedChoice(FIXED, (*sizes, parts)), partial(_shaped, x, slices, FixedShape(*sizes), parts)
    if slices is None and not few:
        yield from _library(x, weight)


def _prefetching(x: Any, weight: Any, slices: Any) -> Iterator[tuple[str, FixedChoice | None, Way]]:
    """Kernels of Hopper, each alone and with early launch; the table is for engines, whose steps launch early."""
    from quire.kernels.triton import fixed_prefetch, fixed_tiles
    from quire.kernels.triton.linear_prefetch import PrefetchScratch, multiprocessors

    scratch = PrefetchScratch.allocate(_DEVICE)
    units = fixed_prefetch.units_for(x.shape[0], weight, slices)
    if units is not None and units.fits(x, weight, scratch):
        yield "prefetch", None, partial(_prefetched, x, units, scratch, False)
        yield "prefetch early", FixedChoice(PREFETCH), partial(_prefetched, x, units, scratch, True)
    deep = fixed_tiles.TileScratch.allocate(_DEVICE, multiprocessors(x.device))
    if x.shape[0] >= _TILE_ROWS:
        yield from _wide(x, weight, slices, wide_shapes(x.shape[0], slices), deep.deep)
    for sizes in hopper_tiles(x.shape[0], slices):
        tiles = fixed_tiles.FixedTiles.of(sizes)
        if fixed_tiles.fits(x, weight, slices, tiles, scratch, deep):
            yield (f"tiles {' '.join(map(str, sizes))}", FixedChoice(TILES, sizes),
                   partial(_tiled, x, slices, tiles, scratch, deep))


def _wide(
    x: Any, weight: Any, slices: Any, shapes: Iterable[tuple[int, ...]], deep: Any = None, gated: bool = False
) -> Iterator[tuple[str, FixedChoice | None, Way]]:
    from quire.kernels.cuda import wide_gemm

    if not wide_gemm.available(x.device, x.dtype):
        return
    for sizes in shapes:
        shape = wide_gemm.WideShape.of(sizes)
        variant = wide_gemm.variant_of(shape, weight.shape[1], slices, gated=gated, rounded=gated)
        if variant is not None and wide_gemm.fits(x, weight, variant, deep):
            yield f"{WIDE} {' '.join(map(str, sizes))}", FixedChoice(WIDE, sizes), partial(_widened, x, variant, deep)


def hopper_tiles(rows: int, slices: Any) -> tuple[tuple[int, ...], ...]:
    """Sizes of `fixed_tiles` to try."""
    if rows < _TILE_ROWS:
        return ()
    if slices is None:
        return _WHOLE_TILES
    tried = _HEAD_TILES if slices.longest <= _HEADS[0][2] else _RANGE_TILES
    return tuple(each for each in tried if each[2] == 1 or rows <= _MOST_SHARED_ROWS)


def tiles_for(rows: int, slices: Any) -> tuple[tuple[int, ...], ...]:
    """Tiles of `linear_fixed` for more than a few rows, each with its number of parts, if those are nodes of the
    slices' tree."""
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


def _tiled(x: Any, slices: Any, tiles: Any, scratch: Any, deep: Any, weight: Any) -> Any:
    from quire.kernels.triton.fixed_tiles import linear_fixed_tiles

    return linear_fixed_tiles(x, weight, None, None, slices, tiles=tiles, scratch=scratch, deep=deep, pdl=True)


def _widened(x: Any, variant: Any, deep: Any, weight: Any) -> Any:
    """WATCHED: where it would never end it fails."""
    from quire.kernels.cuda.wide_gemm import linear_wide

    found = linear_wide(x, weight, variant=variant, deep=deep, pdl=True, watched=True)
    if found is None:
        raise RuntimeError("the kernel cannot be made, or its parts do not run at once")
    return found


def _library(x: Any, weight: Any) -> Iterator[tuple[str, None, Way]]:
    import torch

    from quire.kernels.cublas import CublasLt

    yield "torch", None, lambda w: torch.mm(x, w.t())
    library = CublasLt(x.device, torch.bfloat16)
    features, width = weight.shape
    offered = library.candidates(x.shape[0], features, width, _FIRST_ALGORITHMS)
    for number, candidate in enumerate(offered):
        yield f"algorithm {number}", None, partial(_named, library, x, candidate.code)
    library.close()


def _named(library: Any, x: Any, code: str, weight: Any) -> Any:
    return library.gemm(x, weight, code)


def compile_all(models: list[str], rows: list[int], only: list[str], weights: list[int]) -> None:
    """Fills Triton's cache: one process for each weight runs everything once."""
    here = [*module_command("quire.bench.gpu.tune_fixed"), "--quiet", "--rows", *map(str, rows)]
    here += ["--only", *only] if only else []
    jobs = [subprocess.Popen([*here, "--models", model, "--weights", str(index)], env=child_environment())
            for model in models for index in weights]  # fmt: skip
    for job in jobs:
        job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6b"], choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--weights", nargs="+", type=int, default=[0, 1, 2, 3, 4],
                        help="of 0 qkv, 1 output projection, 2 gate and up, 3 down, 4 head")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="ways whose names begin so")
    parser.add_argument("--write", metavar="FILE", type=Path,
                        help="the table of the fastest; what it has of other weights and rows stays")
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS",
                        help="time the fastest again, in launches of so many seconds each")
    parser.add_argument("--quiet", action="store_true", help="run everything and print nothing")
    args = parser.parse_args()
    if not args.quiet:
        compile_all(args.models, args.rows, args.only, args.weights)
    entries = []
    for model in args.models:
        for line in measure(model, args.rows, args.only, args.weights, 0.0 if args.quiet else args.sustained):
            chosen = best(line)
            entries += [] if chosen is None else [chosen]
            if not args.quiet:
                print(json.dumps(line), flush=True)
            if args.write:  # after each, so that a run that is cut short leaves what it has
                write(args.write, entries, device=_device(), dtype="bfloat16", date=time.strftime("%Y-%m-%d"))


def _device() -> str:
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
