"""Ministral 3: Mistral whose queries grow with the position, past the length before yarn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.layers.spec import QueryGrowth
from quire.models.config_reader import ConfigReader, positive
from quire.models.families.llama import NAMES, llama_like
from quire.models.families.mistral import every_window
from quire.models.family import Family
from quire.models.rope_config import rope_of, trained_length
from quire.models.spec import DecoderSpec

_BETA = "llama_4_scaling_beta"


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("attention_bias", False)
    c.allow("mlp_bias", False)
    fields = c.get("rope_parameters")
    if not isinstance(fields, Mapping):
        c.fail("rope_parameters", f"must be an object, not {fields!r}")
    spec = llama_like(
        c,
        qkv_bias=False,
        out_bias=False,
        windows=every_window(c),
        ropes_of=lambda dim: (rope_of(c, dim, also=(_BETA, "max_position_embeddings")),),
        head_dim=128,
        eps=1e-5,
    )
    growth = QueryGrowth(positive(c, f"rope_parameters.{_BETA}", fields.get(_BETA)), trained_length(c, fields))
    layers = (replace(layer, attention=replace(layer.attention, growth=growth)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


FAMILY = Family("Ministral3ForCausalLM", read, NAMES)
