"""SmolLM3: Llama in which some layers do not rotate (NoPE), and those may have a window."""

from __future__ import annotations

from quire.models.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families.llama import NAMES, llama_like
from quire.models.family import Family
from quire.models.rope_config import rope_of
from quire.models.spec import DecoderSpec


def _rotated(c: ConfigReader, count: int) -> list[bool]:
    """Which layers rotate: `no_rope_layers` lists a 1 for each that does, whatever its name says."""
    listed = c.get("no_rope_layers")
    if listed is None:
        every = c.size("no_rope_layer_interval", 4)
        return [bool((index + 1) % every) for index in range(count)]
    if not isinstance(listed, list) or len(listed) != count or not all(value in (0, 1) for value in listed):
        c.fail("no_rope_layers", f"must list 0 or 1 for each of the {count} layers of num_hidden_layers")
    return [bool(value) for value in listed]


def read(c: ConfigReader) -> DecoderSpec:
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    rotated = _rotated(c, count)
    used = c.flag("use_sliding_window", False) and c.get("sliding_window") is not None
    window = c.size("sliding_window", most=MAX_POSITIONS) if used else None
    bias = c.flag("attention_bias", False)
    return llama_like(
        c,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=c.flag("mlp_bias", False),
        windows=c.layer_windows(count, window, [used and not turns for turns in rotated]),
        rotated=rotated,
        ropes_of=lambda dim: (rope_of(c, dim, default_theta=2_000_000.0),),
        tied=True,
    )


FAMILY = Family("SmolLM3ForCausalLM", read, NAMES)
