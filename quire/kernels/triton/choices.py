"""Which kernel multiplies few rows by which weight: a small table, measured once and kept with the code.

`products.json` has one entry per (rows, weight, form) that `quire bench gpu --tune` timed; a weight that is not in
it takes the choice of the one nearest in shape. Nothing is timed at start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import torch

PLAIN, NORM, GATED = "plain", "norm", "gated"
"""Forms of a product: alone (with or without a residual), after a norm, after a norm and before a gate."""
LIBRARY = "library"
MOST_ROWS = 64
"""More rows than this are the library's."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`row`, `apart` (a norm of its own, then `row`), `vector`, `strip` (with the kernel's sizes) or the library's
    product."""

    kernel: str = LIBRARY
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timed:
    """One measured entry: `rows` and fewer (down to the entry before) of a weight as it is stored."""

    rows: int
    features: int
    width: int
    form: str
    choice: Choice


@lru_cache(maxsize=1)
def table() -> tuple[Timed, ...]:
    text = resources.files("quire.kernels.triton").joinpath("products.json").read_text(encoding="utf-8")
    return tuple(parse(json.loads(text)["products"]))


def parse(entries: Iterable[dict]) -> Iterable[Timed]:
    for entry in entries:
        yield Timed(
            entry["rows"], entry["features"], entry["width"], entry["form"],
            Choice(entry["kernel"], tuple(entry.get("sizes", ()))),
        )


def choose(known: Iterable[Timed], rows: int, features: int, width: int, form: str) -> Choice:
    """The entry for the fewest rows that are enough, of the weight nearest in shape."""
    fitting = [entry for entry in known if entry.form == form and entry.rows >= rows]
    if not fitting:
        return Choice()

    def distance(entry: Timed) -> tuple[int, float]:
        away = abs(math.log2(entry.features / features)) + abs(math.log2(entry.width / width))
        return entry.rows, away

    return min(fitting, key=distance).choice


@lru_cache(maxsize=4096)
def product(rows: int, features: int, width: int, dtype: torch.dtype, form: str = PLAIN) -> Choice:
    """What multiplies `rows` rows by a weight [features, width]; float32 has no tensor cores to gain from."""
    if dtype == torch.float32:
        return Choice("row", (4, 512, 4)) if rows == 1 else Choice("vector") if rows <= 4 else Choice()
    return choose(table(), rows, features, width, form) if rows <= MOST_ROWS else Choice()
