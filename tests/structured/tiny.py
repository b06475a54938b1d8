"""Tiny random models with real tokenizers of the kinds in use, for outputs that must have a shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire import LLM
from quire.tokenizer.tokenizer import Tokenizer
from tests.engine.vocabularies import byte_level, sentencepiece

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokenizer_of(kind: str) -> Tokenizer:
    return byte_level() if kind == "byte_level" else sentencepiece(strip=1 if kind == "llama2" else 0)


def make_model(folder: Path, kind: str = "byte_level") -> Path:
    """A folder with a config and a tokenizer; the weights are made up when it is loaded."""
    tokenizer = tokenizer_of(kind)
    folder.mkdir(parents=True, exist_ok=True)
    # A few ids more than the tokenizer knows, as padded vocabularies have.
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": tokenizer.vocab_size + 5}))
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


def tiny_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", num_threads=1, **{"num_kv_blocks": 256, **options})
