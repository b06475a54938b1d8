"""Files that a run keeps: written whole or not at all, and refused by name where they were damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ModelLoadError


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """A kill while it is written leaves what was there before."""
    part = path.with_name(f"{path.name}.part")
    save_file(dict(tensors), part, metadata)
    part.replace(path)


@contextmanager
def reading(path: Path, instead: str) -> Iterator[None]:
    """`instead`: what to do without a file that cannot be read."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"{path} cannot be read ({why}): {instead}") from error
