"""Reads a Hugging Face config field by field; what cannot be is refused by the field's name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.layers.spec import Activation
from quire.models.loader.fp8_config import fp8_scheme
from quire.models.loader.quantization_config import integer_scheme
from quire.models.loader.quantization_fields import FIELD as QUANTIZATION
from quire.models.loader.quantization_fields import only_keys_and_values

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
}
"""Features that change the result: refused, never ignored, unless the family says that it handles the field."""

MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_HIDDEN = 2**20
MAX_WIDTH = 2**24
"""Of a vocabulary or an MLP. Limits far above any model: a corrupted config cannot ask for the moon."""
MAX_POSITIONS = 2**26


class ConfigReader:
    """A config.json (of transformers 4 or 5) with checked access; JSON null counts as absent everywhere."""

    def __init__(self, config: Mapping[str, Any], architecture: str, handled: Collection[str] = ()) -> None:
        nested = config.get("text_config")
        self._config: Mapping[str, Any] = {**config, **nested} if isinstance(nested, Mapping) else config
        self.architecture = architecture
        for field, allowed in _REFUSED_UNLESS.items():
            if field not in handled:
                self.allow(field, *allowed)
        stored = self.get(QUANTIZATION)
        known = integer_scheme(self._config) is not None or fp8_scheme(self._config) is not None
        if QUANTIZATION not in handled and not known and stored is not None and not only_keys_and_values(stored):
            self.refuse(QUANTIZATION, stored)

    def fail(self, field: str, why: str) -> NoReturn:
        raise ModelLoadError(f"config.json of {self.architecture}: {field} {why}")

    def refuse(self, field: str, value: object, hint: str = "") -> NoReturn:
        raise UnsupportedModelError(
            f"config.json of {self.architecture}: {field}={value!r} is not supported{hint}"
        )

    def get(self, field: str) -> Any:
        return self._config.get(field)

    def with_fields_of(self, field: str) -> ConfigReader:
        """A reader of the config that `field` holds, and of all fields beside it."""
        inner = self.get(field)
        if not isinstance(inner, Mapping):
            self.fail(field, "is missing" if inner is None else f"must be a mapping, not {inner!r:.80}")
        outer = {name: value for name, value in self._config.items() if value is not None}
        return ConfigReader({**inner, **outer}, self.architecture)

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

    def optional_number(self, field: str, absent: float | None = None) -> float | None:
        """A positive number, None where the config says null, `absent` where it says nothing."""
        if self.get(field) is None:
            return None if field in self._config else absent
        return self.number(field)

    def optional_size(self, field: str, absent: int | None = None, most: int = MAX_WIDTH) -> int | None:
        """A positive integer, None where the config says null, `absent` where it says nothing."""
        if self.get(field) is None:
            return None if field in self._config else absent
        return self.size(field, most=most)

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


def positive(reader: ConfigReader, field: str, value: object, default: float | None = None) -> float:
    """`value` as a positive, finite number."""
    value = default if value is None else value
    if value is None:
        reader.fail(field, "is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        reader.fail(field, f"must be a positive number, not {value!r}")
    return float(value)
