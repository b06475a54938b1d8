"""Texts as they are made, in files of a folder: after a kill the same command goes on with those that were written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from quire.training.kept import reading
from quire.training.origin import check_origin
from quire.training.texts import Pair, Texts

_TOKENS, _SECONDS = 50_000, 60.0
"""Of answers that may be lost, and of the time that they took."""
_ORIGIN = "origin.json"


def claim(parts: Path, made_with: Mapping[str, object]) -> None:
    """The folder is for texts of this origin from now on; refused where it holds texts of another."""
    told = parts / _ORIGIN
    if told.is_file() and _files(parts):
        with reading(told, f"delete {parts} to begin again"):
            found = dict(json.loads(told.read_text()))
        check_origin(found, made_with, parts.parent)
        return
    parts.mkdir(exist_ok=True)
    part = parts / f"{_ORIGIN}.part"
    part.write_text(json.dumps(made_with))
    part.replace(told)


def written(parts: Path) -> Texts:
    """Of all runs and processes, in one order."""
    return Texts.joined([Texts.of([]), *map(Texts.load, _files(parts))])


def next_run(parts: Path) -> int:
    """How many runs wrote there before."""
    return max((int(path.name.split("-")[0]) + 1 for path in _files(parts)), default=0)


def _files(parts: Path) -> list[Path]:
    return sorted(parts.glob("*.safetensors"))


class Writer:
    """Of what one process of a run makes."""

    def __init__(self, parts: Path, run: int, process: int) -> None:
        self._parts = parts
        self._name = f"{run:04}-{process:04}"
        self._count = self._tokens = 0
        self._since = time.monotonic()
        self._pairs = list[Pair]()

    def add(self, pair: Pair) -> None:
        self._pairs.append(pair)
        self._tokens += len(pair[1])

    @property
    def due(self) -> bool:
        return self._tokens >= _TOKENS or time.monotonic() - self._since >= _SECONDS

    def write(self) -> None:
        if self._pairs:
            Texts.of(self._pairs).save(self._parts / f"{self._name}-{self._count:06}.safetensors")
            self._count += 1
        self._pairs.clear()
        self._tokens, self._since = 0, time.monotonic()
