"""Which models a head can be trained for, and with which options: known from the model's config, before any text is
made."""

from __future__ import annotations

import math

from quire.errors import ConfigError
from quire.kernels.quantized import UNIT
from quire.layers.spec import MlpSpec
from quire.models.spec import DecoderSpec
from quire.training.options import TrainingOptions

_TRAINED_BYTES = 16
"""Of a weight at least: itself, its gradient and two numbers of the optimizer, as floats."""


def check_trainable(spec: DecoderSpec, options: TrainingOptions, memory: float = math.inf) -> None:
    """Refuse what no head can be trained for, or not this one, or not with so many bytes of memory."""
    check_target(spec)
    if options.max_length > spec.max_positions:
        raise ConfigError(f"--max-length {options.max_length} is more than the {spec.max_positions} positions that the "
                          "model was made for: lower it", "max_length")
    if options.depth + 1 >= options.max_length:
        raise ConfigError(f"--depth {options.depth} is too much for texts of at most --max-length "
                          f"{options.max_length} tokens: lower it", "depth")
    needed = _TRAINED_BYTES * _matrix_weights(spec, options.intermediate)
    if needed > memory:
        raise ConfigError(f"a head with --intermediate {options.intermediate} takes {needed / 2**30:.1f} GiB to train, "
                          f"and {memory / 2**30:.1f} are free: lower it", "intermediate")
    attention = spec.layers[0].attention
    widths = (spec.hidden_size, options.intermediate, attention.num_heads * attention.head_dim)
    if options.weights == "int4" and any(width % UNIT for width in widths):
        raise ConfigError(f"matrices of widths {widths} have no whole groups of {UNIT} columns for int4: take int8",
                          "weights")
    if options.start == "target" and not _like_a_head(spec, options.intermediate):
        raise ConfigError("the target's last layer is no start for this head: --intermediate must be the width of "
                          "its MLP, and its parts those of a Llama", "start")


def _matrix_weights(spec: DecoderSpec, intermediate: int) -> int:
    own, hidden = spec.layers[0].attention, spec.hidden_size
    attention = hidden * own.head_dim * (3 * own.num_heads + 4 * own.num_kv_heads)  # it reads two streams
    return 3 * hidden * hidden + attention + 3 * hidden * intermediate


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
