"""Which models a head can be trained for, and with which options: known from the model's config, before any text is
made."""

from __future__ import annotations

import math

from quire.errors import ConfigError
from quire.kernels.quantized import UNIT
from quire.layers.spec import MlpSpec
from quire.models.spec import DecoderSpec
from quire.training.options import TrainingOptions


def check_trainable(spec: DecoderSpec, options: TrainingOptions) -> None:
    """Refuse what no head can be trained for, or not this one."""
    check_target(spec)
    attention = spec.layers[0].attention
    widths = (spec.hidden_size, options.intermediate, attention.num_heads * attention.head_dim)
    if options.weights == "int4" and any(width % UNIT for width in widths):
        raise ConfigError(f"matrices of widths {widths} have no whole groups of {UNIT} columns for int4: take int8",
                          "weights")
    if options.start == "target" and not _like_a_head(spec, options.intermediate):
        raise ConfigError("the target's last layer is no start for this head: --intermediate must be the width of "
                          "its MLP, and its parts those of a Llama", "start")


def check_target(spec: DecoderSpec) -> None:
    """Refuse a model that no head can be trained for."""
    why, attention, rope = None, spec.layers[0].attention, spec.ropes[0] if spec.ropes else None
    if spec.embed_dim != spec.hidden_size or spec.embed_scale != 1.0 or spec.positions is not None:
        why = "changes its embeddings before the first layer"
    elif spec.num_layers < 2:
        why = "has a single layer"
    elif any(layer.attention.latent is not None for layer in spec.layers):
        why = "attends in a latent space"
    elif rope is None or rope.kind != "default" or rope.rotary_dim != attention.head_dim:
        why = "does not turn its heads as a whole, by plain rotary positions"
    if why is not None:
        raise ConfigError(f"quire train eagle cannot train a head for this model: {spec.architecture} {why}", "model")


def begins_at_target(spec: DecoderSpec, options: TrainingOptions) -> bool:
    """And not at random."""
    return options.start != "random" and _like_a_head(spec, options.intermediate)


def _like_a_head(spec: DecoderSpec, intermediate: int) -> bool:
    """Whether its last layer has the parts of a head, of the same sizes."""
    layer, first = spec.layers[-1], spec.layers[0].attention
    own, mlp = layer.attention, layer.mlp
    return (
        layer.placement == "pre" and isinstance(mlp, MlpSpec) and mlp.intermediate == intermediate and mlp.gated
        and mlp.activation == "silu" and not mlp.bias and not own.qkv_bias and not own.out_bias
        and own.qk_norm is None and own.softcap is None and own.window is None and not own.sinks
        and own.growth is None and own.rope == 0 and math.isclose(own.scale, own.head_dim**-0.5)
        and (own.num_heads, own.num_kv_heads) == (first.num_heads, first.num_kv_heads)
        and all(norm is not None and norm.kind == "rms" for norm in (layer.norm, spec.final_norm))
    )  # fmt: skip
