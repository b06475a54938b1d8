"""Which architectures Quire knows: a plain dict from the name in config.json to the family's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.config_reader import ConfigReader
from quire.models.families import (
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    glm,
    glm4,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite,
    llama,
    ministral,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    starcoder2,
)
from quire.models.family import Family
from quire.models.refused import reason
from quire.models.spec import DecoderSpec

_FILES = (
    *(llama, mistral, ministral, ministral3, qwen2, qwen3, smollm3, phi3, glm, glm4, granite, olmo2, olmo3),
    *(cohere, cohere2, gemma2, gemma3, starcoder2, opt, gpt2),
    *(mixtral, qwen2_moe, qwen3_moe, olmoe, gpt_oss, glm4_moe, deepseek_v2, deepseek_v3),
)
FAMILIES: dict[str, Family] = {file.FAMILY.architecture: file.FAMILY for file in _FILES}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family named by `architectures` in a config."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"config.json: architectures must be a list with one name, not {names!r}")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    why = reason(names[0])
    if why is not None:
        raise UnsupportedModelError(f"architecture {names[0]!r} is not supported: {why}")
    raise UnsupportedModelError(
        f"architecture {names[0]!r} is not supported; known architectures: {', '.join(sorted(FAMILIES))}"
    )


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder a config describes; impossible or unsupported values raise, naming the field."""
    family = family_of(config)
    return family.read(ConfigReader(config, family.architecture, family.handles))
