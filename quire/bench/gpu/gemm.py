"""`quire bench gpu --gemm fp8 int8 int4`: GEMMs of quantized weights by every kernel for them, and their limits.

First what the matrix units reach in fp8. Then, for the weights of a layer and 1 to 2,048 rows, the time of each kernel
in a captured graph over weights too large for the cache, behind the norm that quantizes its rows, and the share of the
limit: bytes of the weight over bandwidth, or operations over rate. A wrong result is left out and said so. Kernels are
compiled beforehand by a few processes for each weight. `--tune-quantized FILE` adds the fastest to the GEMM table.
"""

from __future__ import annotations

import math
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

from quire.bench.gpu.cases import FLOPS, READ_BANDWIDTH
from quire.bench.gpu.row_shapes import row_shapes
from quire.bench.gpu.tile_shapes import tile_shapes
from quire.bench.gpu.tune import graph_seconds, weights_of, write
from quire.bench.gpu.tune_prefetch import rings_of
from quire.child import child_environment, module_command

ROWS = (1, 16, 64, 256, 2048)
_ROW_SIZES = ((1, 2048, 4), (2, 1024, 2), (4, 512, 1), (4, 1024, 2))
_CODES_SIZES = ((4, 4, 1), (6, 4, 1), (8, 4, 1), (8, 2, 1), (6, 2, 1), (6, 2, 2), (4, 4, 2), (3, 4, 2), (4, 2, 1),
                (3, 2, 1), (2, 4, 1), (5, 1, 1), (5, 1, 0))
_ROW_CODES_SIZES = ((6, 4, 1), (6, 2, 2), (3, 4, 2))
"""At one row: those that won there."""
_MANY_CODES_SIZES = ((32, ((6, 4, 1), (4, 4, 1))), (64, ((4, 2, 1), (2, 4, 1))), (128, ((3, 2, 1), (2, 4, 1))),
                     (256, ((5, 1, 1),)))
"""Up to so many rows: those that won there, beside tiles."""
_FEW_ROWS = 16
_COMPILERS = 16
"""Processes that compile kernels: those of one weight may be shared by several."""
_SMALL_RINGS = ((1, 5, 2, 0), (1, 3, 4, 0), (1, 6, 2, 1), (1, 5, 2, 2))
"""Of fp8 at one row: two programs of them, and so two kernels, have room on a multiprocessor."""
_TILES = ((64, 128, 128, 4, 4), (128, 128, 128, 8, 4), (128, 256, 128, 8, 3))
_INT8_TILES = ((16, 32, 256, 4, 4), (16, 64, 256, 4, 4), (64, 64, 128, 4, 4), (128, 128, 128, 8, 4),
               (128, 256, 128, 8, 3))
_LEAST_BYTES = 2e8
_MOST_ERROR = 0.06
"""Of rows in fp8 under a gate: 2.6% of each half's sums."""
_GROUP = 128
Ways = dict[str, Callable[[Any], Any]]


def measure(
    models: list[str], formats: list[str], note: Callable[[dict[str, Any]], None], rows: list[int] | None = None,
    path: str | None = None,
) -> None:
    """`path`: a GEMM table that gets the fastest kernels of fp8 and int4."""
    counts = rows or list(ROWS)
    here = module_command("quire.bench.gpu.gemm")
    jobs = [(model, index) for model in models for index in range(4)]
    parts = max(1, _COMPILERS // len(jobs))
    compiling = [subprocess.Popen([*here, model, str(index), f"{part}/{parts}", ",".join(map(str, counts)), *formats],
                                  env=child_environment())
                 for model, index in jobs for part in range(parts)]
    rate = FLOPS
    if "fp8" in formats:
        rates = _ceilings()
        note({"bench": "gpu", "case": "gemm ceiling",
              "TFLOP/s": {name: round(value / 1e12) for name, value in rates.items()}})
        rate = max(rates.values())
    for process in compiling:
        process.wait()
    for form in formats:
        for model, index in jobs:
            found = []
            for line in _weight(model, index, form, rate, counts):
                note(line)
                found += _entries(line)
            if path is not None and found:
                write(path, found)


def _entries(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the GEMM table. Kernels that fuse no norm are asked for by the plain form, at one row too."""
    kernel, *sizes = line["best"].split(" ")
    if line["format"] == "int8":
        return []
    forms = {line["form"]} if kernel.endswith("row") else {line["form"], "plain"}
    chosen = {"kernel": "library" if kernel == "unpacked" else kernel, "sizes": [int(size) for size in sizes],
              "us": line["us"][line["best"]]}
    return [{"rows": line["rows"], "features": line["features"], "width": line["width"],
             "form": f"{line['format']} {form}", **chosen} for form in sorted(forms)]


def text(line: dict[str, Any]) -> str:
    if line["case"] == "gemm ceiling":
        return "fp8 ceiling, TFLOP/s: " + ", ".join(f"{name} {value}" for name, value in line["TFLOP/s"].items())
    ways = ", ".join(f"{name} {us}" for name, us in line["us"].items())
    return (f"{line['format']} {line['model']:>4} {line['features']:>6} x {line['width']:<5} {line['form']:<5} "
            f"{line['rows']:>5} rows, limit {line['limit_us']:g} us ({line['by']}): best {line['best']} "
            f"{line['share']:.0%}; cuBLAS in bf16 {line.get('bf16_us', '-')} us; us: {ways}")


def _ceilings() -> dict[str, float]:
    """FLOP/s of the library's fp8 GEMM with one scale for all, and with scales of rows and features."""
    import torch

    found = {}
    for rows, features, width in ((8192, 8192, 8192), (16384, 24576, 4096), (2048, 24576, 4096), (256, 24576, 4096)):
        x = torch.randn(rows, width, device="cuda").to(torch.float8_e4m3fn)
        w = torch.randn(features, width, device="cuda").to(torch.float8_e4m3fn)
        one, rows_of, features_of = (torch.ones(size, device="cuda") for size in ((), (rows, 1), (1, features)))
        for name, scales in (("one scale", (one, one)), ("rows", (rows_of, features_of))):
            for fast in (True, False):
                call = partial(torch._scaled_mm, x, w.t(), scale_a=scales[0], scale_b=scales[1],
                               out_dtype=torch.bfloat16, use_fast_accum=fast)
                key = f"{rows} x {features} x {width}, {name}{'' if fast else ', exact sums'}"
                try:
                    found[key] = 2 * rows * features * width / graph_seconds([call] * 4)
                except Exception as error:
                    print(f"{key}: {error!r}"[:300], file=sys.stderr)
    return found


def _weight(
    model: str, index: int, format_: str, rate: float, counts: list[int], part: tuple[int, int] | None = None
) -> Iterator[dict[str, Any]]:
    """`part`: only compile, from which kernel on and every how many."""
    dry, (first, every) = part is not None, part or (0, 1)
    form, features, width = weights_of(model)[index]
    make = {"fp8": _Fp8, "int8": _Int8, "int4": _Int4}[format_]
    around = make(form, features, width, 1 if dry else max(2, math.ceil(_LEAST_BYTES / (features * width / 2))))
    for rows in counts:
        seconds: dict[str, float] = {}
        around.begin(rows)
        for name, way in list(around.ways(rows).items())[first::every]:
            try:
                if not dry and not around.right(way):
                    raise ArithmeticError("the result is wrong")
                seconds[name] = graph_seconds([partial(way, w) for w in around.weights], dry)
            except Exception as error:
                print(f"{format_} {name} on {features} x {width}, {rows} rows: {error!r}"[:400], file=sys.stderr)
        if not dry and seconds:
            read = around.nbytes / READ_BANDWIDTH
            done = 2 * rows * features * width / ({"fp8": rate, "int8": 2 * FLOPS}.get(format_, FLOPS))
            best = min(seconds, key=lambda name: seconds[name])
            floats = {"bf16_us": round(1e6 * around.float_seconds(), 2)} if rows > 1 else {}
            yield {"bench": "gpu", "case": "gemm", "format": format_, "model": model, "features": features,
                   "width": width, "form": form if rows == 1 else "plain", "rows": rows,
                   "limit_us": round(1e6 * max(read, done), 2), "by": "bytes" if read > done else "FLOPs",
                   "best": best, **floats, "share": round(max(read, done) / seconds[best], 3),
                   "us": {name: round(1e6 * value, 2) for name, value in sorted(seconds.items(), key=lambda i: i[1])}}


class _Around(ABC):
    """A weight with what is next to its GEMM in a step: the norm before it; at one row also gate or residual."""

    def __init__(self, form: str, features: int, width: int, copies: int) -> None:
        import torch

        from quire.kernels.triton.linear_prefetch import PrefetchScratch

        self.form, self.features, self.width = form, features, width
        self.scratch = PrefetchScratch.allocate("cuda")
        self.gain = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        self.weights: list[Any] = []
        self.floats: Any = None
        self.nbytes = 0
        for _ in range(copies):
            self.weights.append(self.packed(torch.randn(features, width, device="cuda", dtype=torch.bfloat16) / 64))

    @abstractmethod
    def packed(self, floats: Any) -> Any:
        """A weight in the format."""

    @abstractmethod
    def ways(self, rows: int) -> Ways:
        """Every kernel for so many rows, by name."""

    def begin(self, rows: int) -> None:
        import torch

        self.x = torch.randn(rows, self.width, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.randn(rows, self.features, device="cuda", dtype=torch.bfloat16)
        self.one = rows == 1

    def right(self, way: Callable[[Any], Any]) -> bool:
        """Against the weight in floats; a gate or a residual comes along at one row."""
        import torch

        from quire.kernels.triton.activation import act_mul_reference
        from quire.kernels.triton.norm import rms_norm_reference

        first = self.x if self.one and self.form == "plain" else rms_norm_reference(self.x, self.gain.float(), 1e-6)
        want = torch.mm(first.float(), self.floats.float().t())
        if self.one:
            want = want + self.residual if self.form == "plain" else want
            want = act_mul_reference(want, "silu") if self.form == "gated" else want
        got = way(self.weights[0]).float()
        return bool(((got - want).norm() <= _MOST_ERROR * want.norm()).item())

    def float_seconds(self) -> float:
        """What cuBLAS takes in bf16, behind the same norm."""
        import torch

        from quire.kernels.triton.norm import rms_norm

        copies = max(2, math.ceil(_LEAST_BYTES / (self.features * self.width * 2)))
        floats = [torch.randn(self.features, self.width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        return graph_seconds([lambda w=w: torch.mm(rms_norm(self.x, self.gain, 1e-6, pdl=True), w.t())  # type: ignore
                              for w in floats])

    def fused(self) -> dict[str, Any]:
        """What a kernel of one row does besides."""
        if self.form == "plain":
            return {"residual": self.residual}
        return {"norm": self.gain, "eps": 1e-6, "gated": "silu" if self.form == "gated" else None}

    def ended(self, found: Any) -> Any:
        """What follows at one row: the gate."""
        from quire.kernels.triton.activation import act_mul

        return act_mul(found, "silu", pdl=True) if self.one and self.form == "gated" else found


class _Fp8(_Around):
    kind = "fp8"

    def packed(self, floats: Any) -> Any:
        import torch

        scales = floats.float().abs().amax(1) / 448.0
        codes = (floats.float() / scales[:, None]).to(torch.float8_e4m3fn)
        if self.floats is None:
            self.floats, self.nbytes = codes.float() * scales[:, None], codes.nbytes
        return codes, scales

    def rows(self, pdl: bool = True) -> Any:
        import torch

        from quire.kernels.triton import coded_rows

        dtype = torch.int8 if self.kind == "int8" else coded_rows.FP8
        if self.one and self.form == "plain":
            return coded_rows.quantize_rows(self.x, dtype=dtype, pdl=pdl)
        return coded_rows.norm_rows(self.x, None, self.gain, 1e-6, dtype=dtype, pdl=pdl)

    def ways(self, rows: int) -> Ways:
        from quire.kernels.triton.linear_bytes import BytesShape
        from quire.kernels.triton.linear_prefetch import PrefetchShape

        found: Ways = {"library": self._library}
        if rows == 1:
            found |= self._one_row()
        if rows <= 256:
            rings = [*rings_of(self.features, self.width, rows, 1), *(_SMALL_RINGS if rows == 1 else ())]
            for shape in rings:
                found["prefetch " + " ".join(map(str, shape))] = partial(self._prefetch, PrefetchShape(*shape))
        for tile in _TILES[:1] if rows <= 64 else _TILES[1:]:
            found["tiles " + " ".join(map(str, tile))] = partial(self._tiles, BytesShape(*tile))
        return found

    def _added(self) -> Any:
        return self.residual if self.one and self.form == "plain" else None

    def _library(self, weight: Any) -> Any:
        import torch

        rows = self.rows()
        found = torch._scaled_mm(rows.codes, weight[0].t(), scale_a=rows.scales[:, None], scale_b=weight[1][None],
                                 out_dtype=torch.bfloat16, use_fast_accum=True)
        added = self._added()
        return self.ended(found if added is None else found.add_(added))

    def _one_row(self) -> Ways:
        found: Ways = {}
        for size in _ROW_SIZES:
            name = " ".join(map(str, size))
            found["row " + name] = partial(self._row, size, False)
            if self.form != "plain":
                found["norm_then_row " + name] = partial(self._row, size, True)
        for shape in row_shapes(self.weights[0][0], self.form == "gated") if self.kind == "fp8" else ():
            found["bytes_row " + " ".join(map(str, astuple(shape)))] = partial(self._bytes_row, shape)
        return found

    def _bytes_row(self, shape: Any, weight: Any) -> Any:
        from quire.kernels.triton.codes_row import linear_bytes_row

        return linear_bytes_row(self.x, *weight, sizes=shape, scratch=self.scratch, pdl=True, **self.fused())

    def _row(self, shape: tuple[int, ...], apart: bool, weight: Any) -> Any:
        """`apart`: the norm in its own kernel."""
        from quire.kernels.triton.linear_row import RowShape, linear_row
        from quire.kernels.triton.norm import rms_norm

        x = rms_norm(self.x, self.gain, 1e-6, pdl=True) if apart else self.x
        fused = self.fused() | ({"norm": None} if apart else {})
        return linear_row(x, weight[0], scales=weight[1], sizes=RowShape(*shape), pdl=True, **fused)

    def _prefetch(self, sizes: Any, weight: Any) -> Any:
        from quire.kernels.triton.linear_prefetch import linear_prefetch

        rows, out = self.rows(), self.x.new_empty(len(self.x), self.features)
        return self.ended(linear_prefetch(rows.codes, weight[0], None, self._added(), sizes=sizes, scratch=self.scratch,
                                       scales=(weight[1], rows.scales), out=out, pdl=True))

    def _tiles(self, sizes: Any, weight: Any) -> Any:
        from quire.kernels.triton.linear_bytes import linear_bytes

        rows = self.rows(pdl=False)
        return self.ended(linear_bytes(rows.codes, weight[0], (weight[1], rows.scales), None, self._added(),
                                     out=self.x.new_empty(len(self.x), self.features), sizes=sizes))


class _Int8(_Fp8):
    """Rows and weights in int8: the kernel of one row, and tiles."""

    kind = "int8"

    def packed(self, floats: Any) -> Any:
        import torch

        scales = floats.float().abs().amax(1) / 127.0
        codes = (floats.float() / scales[:, None]).round().to(torch.int8)
        if self.floats is None:
            self.floats, self.nbytes = codes.float() * scales[:, None], codes.nbytes
        return codes, scales

    def ways(self, rows: int) -> Ways:
        from quire.kernels.triton.linear_bytes import BytesShape

        found: Ways = {} if rows <= 16 else {"library": self._library}
        if rows == 1:
            found |= self._one_row()
        for tile in _INT8_TILES[:3] if rows <= 64 else _INT8_TILES[2:]:
            found["tiles " + " ".join(map(str, tile))] = partial(self._tiles, BytesShape(*tile))
        return found

    def _library(self, weight: Any) -> Any:
        import torch

        rows = self.rows()
        found = torch._int_mm(rows.codes, weight[0].t()) * rows.scales[:, None] * weight[1]
        return found.to(torch.bfloat16)


class _Int4(_Around):
    def packed(self, floats: Any) -> Any:
        import torch

        from quire.kernels.quantized import QuantizedWeight
        from quire.kernels.triton import linear_codes

        groups = floats.float().view(self.features, -1, _GROUP)
        scales = groups.abs().amax(-1) / 7.5
        codes = (groups / scales[:, :, None] + 8).round().clamp(0, 15).to(torch.uint8).view(self.features, self.width)
        weight = linear_codes.pack(QuantizedWeight(codes, scales, None, 8, 4, _GROUP), torch.bfloat16)
        if self.floats is None:
            self.floats, self.nbytes = linear_codes.unpacked(weight), weight.words.nbytes + weight.scales.nbytes
        return weight

    def rows(self) -> Any:
        from quire.kernels.triton.norm import rms_norm

        return self.x if self.one and self.form == "plain" else rms_norm(self.x, self.gain, 1e-6, pdl=True)

    def ways(self, rows: int) -> Ways:
        from quire.kernels.triton.codes_tiles import MOST_ROWS
        from quire.kernels.triton.linear_codes import CodesShape, fits

        found: Ways = self._one_row() if rows == 1 else {}
        for tiles in tile_shapes(rows, self.weights[0], self.scratch) if _FEW_ROWS < rows <= MOST_ROWS else ():
            found["codes_tiles " + " ".join(map(str, astuple(tiles)))] = partial(self._tiles, tiles)
        many = next((shapes for most, shapes in _MANY_CODES_SIZES if rows <= most), ())
        for shape in _ROW_CODES_SIZES if rows == 1 else _CODES_SIZES if rows <= _FEW_ROWS else many:
            if fits(rows, self.weights[0], CodesShape(*shape), self.scratch):
                found["codes " + " ".join(map(str, shape))] = partial(self._codes, CodesShape(*shape))
        if rows >= 256:
            found["unpacked"] = self._unpacked
        return found

    def _one_row(self) -> Ways:
        found: Ways = {}
        for shape in row_shapes(self.weights[0], self.form == "gated", self.form == "plain"):
            name = " ".join(map(str, astuple(shape)))
            found["codes_row " + name] = partial(self._row, shape)
        return found

    def _row(self, shape: Any, weight: Any) -> Any:
        from quire.kernels.triton.codes_row import linear_codes_row

        return linear_codes_row(self.x, weight, sizes=shape, scratch=self.scratch, pdl=True, **self.fused())

    def _codes(self, sizes: Any, weight: Any) -> Any:
        from quire.kernels.triton.linear_codes import linear_codes

        added = self.residual if self.one and self.form == "plain" else None
        return self.ended(linear_codes(self.rows(), weight, None, added, sizes=sizes, scratch=self.scratch, pdl=True))

    def _tiles(self, sizes: Any, weight: Any) -> Any:
        from quire.kernels.triton.codes_tiles import linear_codes_tiles

        return linear_codes_tiles(self.rows(), weight, sizes=sizes, scratch=self.scratch, pdl=True)

    def _unpacked(self, weight: Any) -> Any:
        import torch

        from quire.kernels.triton.linear_codes import unpack

        floats = self.x.new_empty(self.features, self.width)
        return self.ended(torch.mm(self.rows(), unpack(weight, floats).t()))


if __name__ == "__main__":
    rows_given = [int(count) for count in sys.argv[4].split(",")]
    begin, step = map(int, sys.argv[3].split("/"))
    for each in sys.argv[5:]:
        list(_weight(sys.argv[1], int(sys.argv[2]), each, FLOPS, rows_given, (begin, step)))
