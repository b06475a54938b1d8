"""Which architectures Quire knows: a plain dict from the name in config.json to the family's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.config_reader import ConfigReader
from quire.models.families import gemma3, gpt2, llama, mistral, opt, qwen2, qwen3
from quire.models.family import Family
from quire.models.spec import DecoderSpec

FAMILIES: dict[str, Family] = {
    room.FAMILY.architecture: room.FAMILY for room in (llama, mistral, qwen2, qwen3, gemma3, opt, gpt2)
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family named by `architectures` in a config."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"config.json: architectures must be a list with one name, not {names!r}")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModelError(
        f"architecture {names[0]!r} is not supported; known architectures: {', '.join(sorted(FAMILIES))}"
    )


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder a config describes; impossible or unsupported values raise, naming the field."""
    family = family_of(config)
    return family.read(ConfigReader(config, family.architecture))
