"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from quire.models.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families.llama import NAMES, llama_like
from quire.models.family import Family
from quire.models.spec import DecoderSpec


def every_window(c: ConfigReader, absent: int | None = None) -> list[int | None]:
    """The window of each layer: `sliding_window` on all of them, or on those that `layer_types` names. `absent` is what
    a config without the field means (null always means no window)."""
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    window = c.optional_size("sliding_window", absent, most=MAX_POSITIONS)
    return c.layer_windows(count, window, [window is not None] * count)


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("attention_bias", False)
    c.allow("mlp_bias", False)
    return llama_like(c, qkv_bias=False, out_bias=False, windows=every_window(c, absent=4096))


FAMILY = Family("MistralForCausalLM", read, NAMES)
