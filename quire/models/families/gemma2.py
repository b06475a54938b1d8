"""Gemma 2: window and full layers in turn, norms around every part, soft caps; no norm of q and k."""

from __future__ import annotations

from quire.models.config_reader import MAX_LAYERS, ConfigReader
from quire.models.families.gemma3 import NAMES, gemma_like
from quire.models.family import Family
from quire.models.rope_config import rope_of
from quire.models.spec import DecoderSpec


def read(c: ConfigReader) -> DecoderSpec:
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    return gemma_like(
        c,
        lambda head_dim: (rope_of(c, head_dim),),
        windowed=[index % 2 == 0 for index in range(count)],
        qk_norm=False,
        vocab=256_000,
        positions=8192,
        attention_cap=50.0,
        logit_cap=30.0,
    )


FAMILY = Family("Gemma2ForCausalLM", read, NAMES)
