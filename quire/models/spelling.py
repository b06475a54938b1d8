"""How messages name tensors: as the checkpoint at hand spells them, of the several spellings that are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quire.errors import ModelLoadError
from quire.models.loader.gguf_names import ARCHITECTURE, gguf_name
from quire.models.weight_names import WeightNames

_LAYER = re.compile(r"\.\d+\.")


class Spelling:
    """Remembers which tensors have come, since those that are missing are probably spelled like them."""

    def __init__(self, config: Mapping[str, Any], names: WeightNames) -> None:
        self._names = names
        self._gguf = config.get(ARCHITECTURE)
        self._seen: set[str] = set()

    def saw(self, name: str) -> None:
        self._seen.add(_LAYER.sub(".{}.", name, count=1))

    def of(self, name: str) -> str:
        """A tensor's name in the file, which for GGUF is not the one it is loaded by."""
        found = gguf_name(name, self._gguf) if isinstance(self._gguf, str) else None
        return found or name

    def of_missing(self, targets: Iterable[str]) -> list[str]:
        """The tensors that would have held these parameters of the decoder."""
        return list(dict.fromkeys(self.of(self._likely(target)) for target in targets))

    def _likely(self, target: str) -> str:
        spellings = self._names.spellings(target)
        alike = [name for name in spellings if self._seen_elsewhere(name)]
        if not alike and self._gguf is not None:  # which holds the experts of a layer in one tensor
            alike = [name for name in spellings if self.of(name) != name]
        return (alike or spellings)[0]

    def _seen_elsewhere(self, name: str) -> bool:
        """In another layer. Merged experts end in `.weight` in a GGUF and not in a folder."""
        pattern = _LAYER.sub(".{}.", name, count=1)
        return pattern in self._seen or f"{pattern}.weight" in self._seen

    def explained(self, error: ModelLoadError, name: str) -> ModelLoadError:
        """An error about a tensor, with the tensor's name in the file."""
        return type(error)(str(error).replace(repr(name), repr(self.of(name))))
