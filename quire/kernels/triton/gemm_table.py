"""Which kernel runs a GEMM, by its rows and its weight's shape: a small table, measured once and kept with the code.

`gemm_table.json` has one entry per (rows, weight, form) that `quire bench gpu --tune` timed; a weight that is not in
it takes the choice of the one nearest in shape. Nothing is timed at start.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

PLAIN, NORM, GATED, GATE = "plain", "norm", "gated", "gate"
"""What is fused with a GEMM: nothing but a residual, the norm before it, that norm and the gate after it, the gate
alone."""
FP8, INT4 = "fp8 ", "int4 "
"""Put before the form of a GEMM whose weight is stored in that format."""
FEW = "few "
"""Put before the form of a GEMM of 2 to 8 rows whose kernel takes norm, gate and residual along."""
LIBRARY, WIDE = "library", "wide"

@dataclass(frozen=True, slots=True)
class GemmChoice:
    """The kernel of a GEMM: `row`, `norm_then_row` (the norm in its own kernel), `vector`, `prefetch`, `stream` or
    `wide` (`quire.kernels.cuda`) with their sizes, of fp8 `bytes_row`, of int4 `codes`, `codes_tiles`, `codes_row` or
    `norm_then_codes_row`, `few` (`quire.kernels.cuda.few_gemm`, of forms that begin with `FEW`), or `library` (cuBLAS).
    A cuBLASLt `algorithm` comes first where the installed version has it (`quire.kernels.cublas`)."""

    kernel: str = LIBRARY
    sizes: tuple[int, ...] = ()
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class TimedGemm:
    """One measured entry: `rows` and fewer (down to the entry before) of a weight as it is stored."""

    rows: int
    features: int
    width: int
    form: str
    choice: GemmChoice


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    text = resources.files("quire.kernels.triton").joinpath("gemm_table.json").read_text(encoding="utf-8")
    return json.loads(text)


@lru_cache(maxsize=1)
def table() -> tuple[TimedGemm, ...]:
    return tuple(parse(_file()["gemms"]))


def library_version() -> int:
    """Version of cuBLASLt that the table's algorithms belong to; 0 if it has none."""
    return _file().get("cublaslt", 0)


def parse(entries: Iterable[dict]) -> Iterable[TimedGemm]:
    for entry in entries:
        yield TimedGemm(
            entry["rows"], entry["features"], entry["width"], entry["form"],
            GemmChoice(entry["kernel"], tuple(entry.get("sizes", ())), entry.get("algorithm", "")),
        )


def choose(known: Iterable[TimedGemm], rows: int, features: int, width: int, form: str) -> GemmChoice:
    """The entry for the fewest rows that are enough, of the weight nearest in shape. A library's algorithm is for the
    one weight that it was timed on, and so are the tiles of `wide`, which fill the chip exactly."""
    fitting = [entry for entry in known if entry.form == form and entry.rows >= rows]
    if not fitting:
        return GemmChoice()

    def distance(entry: TimedGemm) -> tuple[int, float]:
        away = abs(math.log2(entry.features / features)) + abs(math.log2(entry.width / width))
        return entry.rows, away

    nearest = min(fitting, key=distance)
    exact = (nearest.features, nearest.width) == (features, width)
    if nearest.choice.kernel == WIDE and not exact:
        return GemmChoice()
    return nearest.choice if exact else replace(nearest.choice, algorithm="")


def lookup(rows: int, features: int, width: int, dtype: torch.dtype, form: str = PLAIN) -> GemmChoice:
    """The kernel for `rows` rows times a weight [features, width]; float32 has no tensor cores to gain from."""
    if dtype == torch.float32:
        return GemmChoice("row", (4, 512, 4)) if rows == 1 else GemmChoice("vector") if rows <= 4 else GemmChoice()
    counts = _row_counts()
    place = bisect_left(counts, rows)
    return _chosen(counts[place], features, width, form) if place < len(counts) else GemmChoice()


@lru_cache(maxsize=4096)
def lookup_few(rows: int, features: int, width: int, form: str) -> GemmChoice | None:
    """The kernel of 2 to 8 rows for just this weight; None if the table has none. Sizes are those of the fastest layer
    (`bench.gpu.tune_few`), also of weights that are no part of it."""
    wanted = features, width, FEW + form
    enough = [entry for entry in table() if (entry.features, entry.width, entry.form) == wanted and entry.rows >= rows]
    return min(enough, key=lambda entry: entry.rows).choice if enough and rows > 1 else None


@lru_cache(maxsize=4096)
def few_knows_gate(features: int, width: int) -> bool:
    """Whether this weight of gate and up is one whose layers' GEMMs of few rows take their norms along."""
    return lookup_few(2, features, width, GATED) is not None


@lru_cache(maxsize=1)
def _row_counts() -> tuple[int, ...]:
    return tuple(sorted({entry.rows for entry in table()}))


@lru_cache(maxsize=4096)
def _chosen(rows: int, features: int, width: int, form: str) -> GemmChoice:
    return choose(table(), rows, features, width, form)
