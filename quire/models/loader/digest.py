"""A digest of a model's weights: two sources with the same one give the same KV for the same tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from quire.models.loader import safetensors

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource

_PIECE = 1 << 22
_READ_WHOLE = 1 << 32
"""Files up to this size are read whole; of larger ones, which take seconds, the first part of every piece."""
_SAMPLE = 1 << 18


def weights_digest(source: ModelSource, seed: int = 0) -> str:
    """Of the config and the content of the weight files; of the seed, where the weights are drawn from it."""
    digest = xxhash.xxh3_128(json.dumps(source.config, sort_keys=True, default=str).encode())
    if source.is_dummy:
        digest.update(f"dummy weights of seed {seed}".encode())
        return digest.hexdigest()
    files = [source.path] if source.path.is_file() else sorted(safetensors.weight_files(source.path))
    for file in files:
        _add(digest, file)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    length = _PIECE if size <= _READ_WHOLE else _SAMPLE
    buffer = bytearray(length)
    with open(file, "rb", buffering=0) as handle:
        for start in range(0, size, _PIECE):
            handle.seek(start, os.SEEK_SET)
            count = handle.readinto(buffer)
            digest.update(memoryview(buffer)[:count])
