"""OLMo 3: OLMo 2 with a window on three layers of four, and scaling of the rotation on the others only."""

from __future__ import annotations

from quire.models.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families.llama import llama_like
from quire.models.families.olmo2 import NAMES
from quire.models.family import Family
from quire.models.rope_config import full_and_window_ropes
from quire.models.spec import DecoderSpec


def read(c: ConfigReader) -> DecoderSpec:
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    window = c.size("sliding_window", 4096, most=MAX_POSITIONS)
    bias = c.flag("attention_bias", False)
    theta = c.number("rope_theta", 500_000.0)
    return llama_like(
        c,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="all",
        windows=c.layer_windows(count, window, [bool((index + 1) % 4) for index in range(count)]),
        ropes_of=lambda dim: full_and_window_ropes(c, dim, theta, theta),
        eps=1e-5,
        placement="output",
    )


FAMILY = Family("Olmo3ForCausalLM", read, NAMES)
