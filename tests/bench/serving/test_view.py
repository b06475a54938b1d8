"""`quire bench view`: what being watched costs, on an engine that computes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}


def test_it_reports_throughput_both_ways_and_what_the_engine_counted(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["bench", "view", "--model", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init", "--executor",
             "dummy", "--dummy-step-ms", "5", "--num-kv-blocks", "200", "--streams", "8", "--output-tokens", "100",
             "--rounds", "1"]
    assert main(words) == 0
    line = json.loads([line for line in capsys.readouterr().out.splitlines() if line.startswith('{"bench"')][-1])
    assert line["tok_s"] > 0 and line["watched_tok_s"] > 0 and line["frames"] > 2
    assert 0 < line["view_share"] < 0.1  # a busy machine may hold up a frame; by itself it is far below 0.02
