"""What a file of a head's format says: how its config is read, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import ATTENTION, MLP
from quire.models.heads.spec import HeadSpec
from quire.models.spec import DecoderSpec

_TOP = {"fc": "fuse", "embed_tokens": "embed", "lm_head": "head", "norm": "norm"}
_ALONE = ("d2t", "t2d")
_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """Public heads of one kind. Some checkpoints put `model.` before every name."""

    architectures: tuple[str, ...]
    read: Callable[[ConfigReader, DecoderSpec], HeadSpec]
    norms: Mapping[str, str]
    """Norms of the layer: their stored names and ours."""
    layers: tuple[str, ...] = ("layers.0.",)
    """What the names of the layer's tensors begin with."""

    def name(self, stored: str) -> str | None:
        """Our name of a stored tensor; None: no head of this kind has it."""
        plain = stored.removeprefix(_PREFIX)
        if plain in _ALONE:
            return plain
        module, _, kind = plain.rpartition(".")
        if module in _TOP:
            return f"{_TOP[module]}.{kind}"
        for prefix in self.layers:
            inner = {**ATTENTION, **MLP, **self.norms}.get(module.removeprefix(prefix))
            if plain.startswith(prefix) and inner is not None:
                return f"{inner}.{kind}"
        return None

    def stored_name(self, name: str) -> str:
        """As the public heads spell it, for messages and for whoever writes one."""
        if name in _ALONE:
            return name
        module, _, kind = name.rpartition(".")
        for stored, ours in _TOP.items():
            if ours == module:
                return f"{stored}.{kind}"
        inner = next(stored for stored, ours in {**ATTENTION, **MLP, **self.norms}.items() if ours == module)
        return f"{self.layers[0]}{inner}.{kind}"
