"""Reads a Hugging Face config field by field; what cannot be is refused by the field's name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.layers.spec import Activation, RopeKind, RopeSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_REFUSED_UNLESS: dict[str, tuple[Any, ...]] = {
    "num_local_experts": (0,),
    "num_experts": (0,),
    "n_routed_experts": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "partial_rotary_factor": (1, 1.0),
    "position_embedding_type": ("absolute", "rope"),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "attention_multiplier": (),
    "quantization_config": (),
}
"""Features of related models that change the result and that no family here has: refused, never ignored."""

MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_HIDDEN = 2**20
MAX_WIDTH = 2**24
"""Of a vocabulary or an MLP. Limits far above any model: a corrupted config cannot ask for the moon."""
MAX_POSITIONS = 2**26


class ConfigReader:
    """A config.json (of transformers 4 or 5) with checked access; JSON null counts as absent everywhere."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        nested = config.get("text_config")
        self._config: Mapping[str, Any] = {**config, **nested} if isinstance(nested, Mapping) else config
        self.architecture = architecture
        for field, allowed in _REFUSED_UNLESS.items():
            self.allow(field, *allowed)

    def fail(self, field: str, why: str) -> NoReturn:
        raise ModelLoadError(f"config.json of {self.architecture}: {field} {why}")

    def refuse(self, field: str, value: object, hint: str = "") -> NoReturn:
        raise UnsupportedModelError(
            f"config.json of {self.architecture}: {field}={value!r} is not supported{hint}"
        )

    def get(self, field: str) -> Any:
        return self._config.get(field)

    def allow(self, field: str, *values: object) -> None:
        """Refuse the config if `field` is there with another value than these."""
        value = self.get(field)
        if value is not None and value not in values:
            self.refuse(field, value)

    def size(self, field: str, default: int | None = None, most: int = MAX_WIDTH) -> int:
        """A positive integer."""
        value = self.get(field)
        value = default if value is None else value
        if value is None:
            self.fail(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            self.fail(field, f"must be an integer from 1 to {most}, not {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive, finite number."""
        return positive(self, field, self.get(field), default)

    def optional_number(self, field: str) -> float | None:
        return None if self.get(field) is None else self.number(field)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.fail(field, f"must be true or false, not {value!r}")
        return value

    def activation(self, field: str, default: str, gated: bool) -> Activation:
        value = self.get(field)
        value = default if value is None else value
        kind = _ACTIVATIONS.get(value) if isinstance(value, str) else None
        if kind is None or (gated and kind == "relu"):
            self.refuse(field, value, f"; known: {', '.join(sorted(_ACTIVATIONS))}")
        return kind

    def heads(self, hidden: int, default_head_dim: int | None = None) -> tuple[int, int, int]:
        """(query heads, key-value heads, head size)."""
        heads = self.size("num_attention_heads", most=MAX_HEADS)
        kv_heads = self.size("num_key_value_heads", heads, most=MAX_HEADS)
        if heads % kv_heads:
            self.fail(
                "num_key_value_heads", f"must divide num_attention_heads: {kv_heads} does not divide {heads}"
            )
        if self.get("head_dim") is None and default_head_dim is None and hidden % heads:
            self.fail("num_attention_heads", f"must divide hidden_size: {heads} does not divide {hidden}")
        return heads, kv_heads, self.size("head_dim", default_head_dim or hidden // heads, most=MAX_HEADS)

    def layer_windows(self, num_layers: int, window: int | None, default: Sequence[bool]) -> list[int | None]:
        """Each layer's window: by `layer_types` if the config has it, else by `default` (True: windowed)."""
        types = self.get("layer_types")
        if types is None:
            windowed = list(default)
        else:
            if not isinstance(types, list) or len(types) != num_layers:
                self.fail("layer_types", f"must list the {num_layers} layers of num_hidden_layers")
            for kind in types:
                if kind not in ("full_attention", "sliding_attention"):
                    self.refuse("layer_types", kind, "; known: full_attention, sliding_attention")
            windowed = [kind == "sliding_attention" for kind in types]
        if any(windowed) and window is None:
            self.fail("sliding_window", "is missing, but some layers are sliding_attention")
        return [window if sliding else None for sliding in windowed]

    def rope(self, head_dim: int, layer_type: str | None = None, default_theta: float = 10000.0) -> RopeSpec:
        """The rotation: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers
        4).

        `layer_type` picks one of a config that has several; without it such a config is refused.
        """
        fields = self.get("rope_parameters")
        fields = self.get("rope_scaling") if fields is None else fields
        fields = {} if fields is None else fields
        if not isinstance(fields, Mapping):
            self.fail("rope_parameters", f"must be an object, not {fields!r}")
        if "full_attention" in fields or "sliding_attention" in fields:
            if layer_type is None:
                self.refuse("rope_parameters", sorted(fields), "; one rotation for all layers is")
            fields = fields.get(layer_type) or {}
            if not isinstance(fields, Mapping):
                self.fail("rope_parameters", f"must hold an object for {layer_type}, not {fields!r}")
        theta = fields.get("rope_theta")
        theta = positive(
            self, "rope_theta", self.get("rope_theta") if theta is None else theta, default_theta
        )
        return read_rope(self, fields, theta, head_dim)


def reach(limit: int, rope: RopeSpec) -> int:
    """Positions that a model can be used at.

    Dynamic scaling begins where the trained ones end. Yarn is often switched on by adding its fields to a
    config that still says the trained length.
    """
    if rope.kind not in ("dynamic", "yarn"):
        return limit
    return max(limit, min(MAX_POSITIONS, int(rope.original_max_positions * rope.factor)))


def read_rope(reader: ConfigReader, fields: Mapping[str, Any], theta: float, head_dim: int) -> RopeSpec:
    """One rotation from its own fields; those it does not know are refused."""
    if not isinstance(fields, Mapping):
        reader.fail("rope_parameters", f"must be an object, not {fields!r}")
    kind = fields.get("rope_type", fields.get("type")) or "default"
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        reader.refuse("rope_type", kind, f"; known: {', '.join(_ROPE_FIELDS)}")
    if head_dim % 2:
        reader.fail("head_dim", f"must be even for a rotation, not {head_dim}")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_FIELDS[kind]}
    for field, value in fields.items():
        if field not in known and value is not None:
            reader.refuse(f"rope_parameters.{field}", value, f" with rope_type {kind}")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        reader.refuse("partial_rotary_factor", fields["partial_rotary_factor"])
    if kind == "default":
        return RopeSpec(theta, head_dim)
    return _scaled_rope(reader, fields, theta, head_dim, kind)


_ROPE_FIELDS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def _scaled_rope(
    reader: ConfigReader, fields: Mapping[str, Any], theta: float, head_dim: int, kind: RopeKind
) -> RopeSpec:
    limit = reader.size("max_position_embeddings", most=MAX_POSITIONS)
    trained = reader.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    if kind == "dynamic" or trained is None:
        # transformers takes the trained length of dynamic scaling from max_position_embeddings in any case
        trained = limit
    trained = int(positive(reader, "original_max_position_embeddings", trained))
    ratio = limit / trained if kind == "yarn" else None
    factor = positive(reader, "rope_parameters.factor", fields.get("factor"), ratio)
    if kind == "yarn" and theta <= 1:
        reader.fail("rope_theta", f"must be above 1 for yarn, not {theta}")
    if kind == "dynamic" and head_dim < 4:
        reader.fail("head_dim", "must be at least 4 for dynamic rope scaling")
    low = positive(
        reader, "low_freq_factor", fields.get("low_freq_factor"), None if kind == "llama3" else 1.0
    )
    high = positive(
        reader, "high_freq_factor", fields.get("high_freq_factor"), None if kind == "llama3" else 4.0
    )
    if high <= low:
        reader.fail(
            "rope_parameters.high_freq_factor", f"must be above low_freq_factor: {high} is not above {low}"
        )
    return RopeSpec(
        theta,
        head_dim,
        kind,
        factor=factor,
        original_max_positions=trained,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=positive(reader, "beta_fast", fields.get("beta_fast") or None, 32.0),
        beta_slow=positive(reader, "beta_slow", fields.get("beta_slow") or None, 1.0),
        truncate=fields.get("truncate") is not False,
        attention_factor=_yarn_attention(reader, fields, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention(reader: ConfigReader, fields: Mapping[str, Any], factor: float) -> float:
    """How much yarn sharpens attention: as stated, else by its paper's rule."""
    if fields.get("attention_factor") is not None:
        return positive(reader, "attention_factor", fields["attention_factor"])

    def sharpness(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        above, below = (positive(reader, f, fields[f]) for f in ("mscale", "mscale_all_dim"))
        return sharpness(above) / sharpness(below)
    return sharpness(1.0)


def positive(reader: ConfigReader, field: str, value: object, default: float | None = None) -> float:
    """`value` as a positive, finite number."""
    value = default if value is None else value
    if value is None:
        reader.fail(field, "is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        reader.fail(field, f"must be a positive number, not {value!r}")
    return float(value)
