"""Which kernel runs a GEMM of deterministic mode on Hopper, by its rows and its weight: measured once, kept with the
code.

`fixed_table.json` has what `python -m quire.bench.gpu.tune_fixed --write` timed. Only kernels that gave the bits of
`linear_fixed` there are in it, so a choice changes no bit. A GEMM that is not in it runs as it did before:
`fixed_prefetch` for a few rows, `linear_fixed` for more. Entries with "gate" are of a GEMM and its gate in one kernel,
which gave the bits of the two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

TILES, PREFETCH, FIXED, WIDE, APART = "tiles", "prefetch", "fixed", "wide", "apart"


@dataclass(frozen=True, slots=True)
class FixedChoice:
    """`tiles` (sizes of `FixedTiles`), `wide` (`WideShape`, in CUDA C), `prefetch`, or `fixed` (none: what
    `linear_fixed` chooses; else `FixedShape` and the number of parts). Of a GEMM with its gate: `wide`, or `apart`, one
    kernel after the other."""

    kernel: str
    sizes: tuple[int, ...] = ()


Weight = tuple[int, int, int]
"""Features, columns, slices."""


Table = dict[Weight, list[tuple[int, FixedChoice]]]


def parse(entries: list[dict[str, Any]]) -> Table:
    """By weight: the choice for up to so many rows, the fewest first."""
    found: Table = {}
    for entry in sorted(entries, key=lambda each: each["rows"]):
        choice = FixedChoice(entry["kernel"], tuple(entry.get("sizes", ())))
        found.setdefault((entry["features"], entry["width"], entry["slices"]), []).append((entry["rows"], choice))
    return found


@lru_cache(maxsize=1)
def _entries() -> list[dict[str, Any]]:
    text = resources.files("quire.kernels.triton").joinpath("fixed_table.json").read_text(encoding="utf-8")
    return json.loads(text)["gemms"]


@lru_cache(maxsize=1)
def table() -> Table:
    return parse([entry for entry in _entries() if not entry.get("gate")])


@lru_cache(maxsize=1)
def gates() -> Table:
    """Of GEMMs with their gates."""
    return parse([entry for entry in _entries() if entry.get("gate")])


def names_wide() -> bool:
    """Whether some GEMM runs the kernel in CUDA C."""
    return any(choice.kernel == WIDE for known in (table(), gates()) for found in known.values() for _, choice in found)


def lookup(rows: int, features: int, width: int, slices: int) -> FixedChoice | None:
    """The entry of the fewest rows that are enough, the last one for any more. None: this weight was not timed, or only
    with more than twice as many rows."""
    return _found(table(), rows, (features, width, slices))


def lookup_gate(rows: int, features: int, width: int) -> FixedChoice | None:
    """The same of a GEMM with its gate, by all features of the weight."""
    return _found(gates(), rows, (features, width, 1))


def _found(known: Table, rows: int, weight: Weight) -> FixedChoice | None:
    timed = known.get(weight)
    if not timed or 2 * rows <= timed[0][0]:
        return None
    return next((choice for most, choice in timed if most >= rows), timed[-1][1])


def write(path: Path, entries: list[dict[str, Any]], **about: str) -> None:
    """Entries that the file has already stay, but for those of the same rows and weight."""
    fields = ("features", "width", "slices", "rows")
    before = json.loads(path.read_text(encoding="utf-8"))["gemms"] if path.exists() else []
    every = {(*(entry[field] for field in fields), entry.get("gate", False)): entry for entry in (*before, *entries)}
    head = "".join(f'"{name}": {json.dumps(value)}, ' for name, value in about.items())
    lines = ",\n".join(f"  {json.dumps(every[key])}" for key in sorted(every))
    path.write_text(f'{{{head}"gemms": [\n{lines}\n]}}\n', encoding="utf-8")
