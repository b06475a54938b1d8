"""What a model family is: an architecture's name, a reader of its config and the spelling of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.models.config_reader import ConfigReader
from quire.models.spec import DecoderSpec
from quire.models.weight_names import WeightNames


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, as data."""

    architecture: str
    read: Callable[[ConfigReader], DecoderSpec]
    names: WeightNames
    handles: tuple[str, ...] = ()
    """Config fields that are refused for every other family, and that this one's `read` looks at."""
