"""Writes a GGUF file: what another one says about its model, and tensors in formats of one's own choice."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.models.loader.gguf import MAGIC, MetadataValue
from quire.models.loader.gguf_quants import QUANT_FORMATS

_VERSION = 3
_ALIGNMENT = 32
_UINT32, _FLOAT32, _BOOL, _STRING = 4, 6, 7, 8
_NUMBERS = {quant.name: number for number, quant in QUANT_FORMATS.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file will hold it; `shape` is row-major, as torch has it."""

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray
    """Its bytes."""


def write_gguf(path: Path, metadata: Mapping[str, MetadataValue], tensors: Iterable[StoredTensor]) -> None:
    """Lists among the metadata, a vocabulary's above all, are left out: the file has no tokenizer."""
    kept = {key: value for key, value in metadata.items() if isinstance(value, str | int | float)}
    kept.pop("general.alignment", None)
    placed, offset = [], 0
    held = list(tensors)
    for tensor in held:
        placed.append(_tensor_info(tensor, offset))
        offset += _filled(tensor.data.nbytes)
    head = b"".join([MAGIC, struct.pack("<IQQ", _VERSION, len(held), len(kept)),
                     *(_text(key) + _value(value) for key, value in kept.items()), *placed])
    with path.open("wb") as file:
        file.write(head.ljust(_filled(len(head)), b"\0"))
        for tensor in held:
            file.write(tensor.data.tobytes().ljust(_filled(tensor.data.nbytes), b"\0"))


def _filled(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    return struct.pack("<II", _UINT32, value) if isinstance(value, int) else struct.pack("<If", _FLOAT32, value)


def _tensor_info(tensor: StoredTensor, offset: int) -> bytes:
    dims = tensor.shape[::-1]
    return _text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, _NUMBERS[tensor.format], offset)
