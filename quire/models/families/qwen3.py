"""Qwen3: Qwen2 without biases, with an RMS norm on every query and key head."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import NAMES, llama_like
from quire.models.families.qwen2 import upper_windows
from quire.models.family import Family
from quire.models.spec import DecoderSpec


def read(c: ConfigReader) -> DecoderSpec:
    bias = c.flag("attention_bias", False)
    return llama_like(c, qkv_bias=bias, out_bias=bias, qk_norm="head", head_dim=128, windows=upper_windows(c))


FAMILY = Family("Qwen3ForCausalLM", read, NAMES)
