"""Granite 3: Llama whose embeddings, scores, residual parts and logits have a factor each."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import NAMES, llama_like
from quire.models.family import Family
from quire.models.spec import DecoderSpec, LayerSpec

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def read(c: ConfigReader) -> DecoderSpec:
    """The residual factor m is put where it costs nothing: all rows are kept divided by it.

    x + m f(norm(x)) divided by m is x/m + f(norm(x)), and an RMS norm of x is one of x/m with eps divided by m * m.
    """
    embedding, attention, residual, logits = (c.number(field, 1.0) for field in _FACTORS)
    bias = c.flag("attention_bias", False)
    spec = llama_like(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", False))
    norm = replace(spec.layers[0].norm, eps=spec.layers[0].norm.eps / residual / residual)

    def scaled(layer: LayerSpec) -> LayerSpec:
        return replace(layer, norm=norm, attention=replace(layer.attention, scale=attention))

    return replace(
        spec,
        layers=tuple(scaled(layer) for layer in spec.layers),
        embed_scale=embedding / residual,
        final_norm=replace(norm, scale=1.0 / logits),
    )


FAMILY = Family("GraniteForCausalLM", read, NAMES, handles=_FACTORS)
