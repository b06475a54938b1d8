"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optionally a window on the upper layers."""

from __future__ import annotations

from collections.abc import Callable

from quire.models.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families.llama import NAMES, llama_like
from quire.models.family import Family
from quire.models.spec import DecoderSpec


def upper_windows(c: ConfigReader) -> list[int | None]:
    """Layers from max_window_layers on have the window, if use_sliding_window says so."""
    return some_windows(c, lambda index, first: index >= first)


def some_windows(c: ConfigReader, windowed: Callable[[int, int], bool]) -> list[int | None]:
    """The window of each layer, if use_sliding_window says so: on the layers of `layer_types`, or where `windowed` says
    so of a layer's number and max_window_layers."""
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    used = c.flag("use_sliding_window", False)
    window = c.optional_size("sliding_window", 4096, most=MAX_POSITIONS) if used else None
    first = c.get("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        c.fail("max_window_layers", f"must be an integer from 0, not {first!r}")
    return c.layer_windows(count, window, [window is not None and windowed(index, first) for index in range(count)])


def read(c: ConfigReader) -> DecoderSpec:
    return llama_like(c, qkv_bias=True, out_bias=False, windows=upper_windows(c))


FAMILY = Family("Qwen2ForCausalLM", read, NAMES)
