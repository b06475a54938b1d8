"""Which kernel multiplies so many rows by which weight: a small table, measured once and kept with the code.

`products.json` has one entry per (rows, weight, form) that `quire bench gpu --tune` timed; a weight that is not in
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

PLAIN, NORM, GATED = "plain", "norm", "gated"
"""Forms of a product: alone (with or without a residual), after a norm, after a norm and before a gate."""
FP8, INT4 = "fp8 ", "int4 "
"""Before a form: of a weight in that format."""
LIBRARY = "library"

@dataclass(frozen=True, slots=True)
class Choice:
    """`row`, `apart` (a norm of its own, then `row`), `vector`, `ahead` (with their sizes) or the library's
    product; before all of them the library's `algorithm`, where its version knows it (`quire.kernels.cublas`)."""

    kernel: str = LIBRARY
    sizes: tuple[int, ...] = ()
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """One measured entry: `rows` and fewer (down to the entry before) of a weight as it is stored."""

    rows: int
    features: int
    width: int
    form: str
    choice: Choice


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    text = resources.files("quire.kernels.triton").joinpath("products.json").read_text(encoding="utf-8")
    return json.loads(text)


@lru_cache(maxsize=1)
def table() -> tuple[Timed, ...]:
    return tuple(parse(_file()["products"]))


def library_version() -> int:
    """Version of cuBLASLt that the table's algorithms belong to; 0 if it has none."""
    return _file().get("cublaslt", 0)


def parse(entries: Iterable[dict]) -> Iterable[Timed]:
    for entry in entries:
        yield Timed(
            entry["rows"], entry["features"], entry["width"], entry["form"],
            Choice(entry["kernel"], tuple(entry.get("sizes", ())), entry.get("algorithm", "")),
        )


def choose(known: Iterable[Timed], rows: int, features: int, width: int, form: str) -> Choice:
    """The entry for the fewest rows that are enough, of the weight nearest in shape. A library's algorithm is for the
    one weight that it was timed on."""
    fitting = [entry for entry in known if entry.form == form and entry.rows >= rows]
    if not fitting:
        return Choice()

    def distance(entry: Timed) -> tuple[int, float]:
        away = abs(math.log2(entry.features / features)) + abs(math.log2(entry.width / width))
        return entry.rows, away

    nearest = min(fitting, key=distance)
    exact = (nearest.features, nearest.width) == (features, width)
    return nearest.choice if exact else replace(nearest.choice, algorithm="")


def product(rows: int, features: int, width: int, dtype: torch.dtype, form: str = PLAIN) -> Choice:
    """What multiplies `rows` rows by a weight [features, width]; float32 has no tensor cores to gain from."""
    if dtype == torch.float32:
        return Choice("row", (4, 512, 4)) if rows == 1 else Choice("vector") if rows <= 4 else Choice()
    counts = _row_counts()
    place = bisect_left(counts, rows)
    return _chosen(counts[place], features, width, form) if place < len(counts) else Choice()


@lru_cache(maxsize=1)
def _row_counts() -> tuple[int, ...]:
    return tuple(sorted({entry.rows for entry in table()}))


@lru_cache(maxsize=4096)
def _chosen(rows: int, features: int, width: int, form: str) -> Choice:
    return choose(table(), rows, features, width, form)
