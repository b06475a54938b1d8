"""Cohere Command R7B and A: Command R with windows on three layers of four; the others do not rotate."""

from __future__ import annotations

from quire.models.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families.cohere import NAMES, cohere_like
from quire.models.family import Family
from quire.models.spec import DecoderSpec


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("use_qk_norm", False)
    c.allow("use_parallel_block", True)
    c.allow("use_gated_activation", True)
    c.allow("rotary_pct", 1, 1.0)
    c.allow("position_embedding_type", "rope_gptj")
    c.allow("order_of_interleaved_layers", "local_attn_first")
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    every = c.size("sliding_window_pattern", 4)
    return cohere_like(
        c,
        c.layer_windows(
            count,
            c.size("sliding_window", 4096, most=MAX_POSITIONS),
            [bool((index + 1) % every) for index in range(count)],
        ),
        lambda window: window is not None,
        qk_norm=False,
        positions=c.size("max_position_embeddings", most=MAX_POSITIONS),
        theta=10_000.0,
    )


FAMILY = Family("Cohere2ForCausalLM", read, NAMES, handles=("position_embedding_type",))
