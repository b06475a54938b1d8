"""What a process that compiles ahead is told, as JSON: the model, the engine's options, the chip, and which share of
the kernels is its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from quire.kernels.quantized import Rounding
from quire.worker.gpu.options import DeviceOptions


@dataclass(frozen=True, slots=True)
class Chip:
    """What the choice of kernels asks of a GPU."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    """Bytes that a program may have."""


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """Kernels of a start."""

    config: dict[str, Any]
    options: DeviceOptions
    block_size: int
    chip: Chip

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: str) -> CompileRequest:
        given = json.loads(text)
        options, chip = given["options"], given["chip"]
        rounding = options["rounding"]
        options["rounding"] = None if rounding is None else Rounding(**rounding)
        chip["capability"] = tuple(chip["capability"])
        return cls(given["config"], DeviceOptions(**options), given["block_size"], Chip(**chip))

    def digest(self, *versions: str) -> str:
        """Of all that its kernels depend on, the sources included."""
        found = hashlib.sha256("\n".join([self.text(), *versions]).encode())
        for folder in ("kernels", "attention", "ops", "layers", "models", "worker"):
            for path in _sources(resources.files("quire").joinpath(folder)):
                found.update(path.read_bytes())
        return found.hexdigest()


def _sources(folder: Traversable) -> list[Traversable]:
    found: list[Traversable] = []
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            found += _sources(each)
        elif each.name.endswith((".py", ".cu", ".json")):
            found.append(each)
    return found
