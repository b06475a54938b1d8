"""`quire bench speculative` prints a line per method, text and batch, and notices tokens that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.bench.speculation.command import _TINY as TINY
from quire.bench.speculation.command import _length
from quire.bench.speculation.dropped_layers import write_dropped
from quire.cli.main import main
from quire.models.build import dummy_weights
from quire.models.loader.source import resolve_model
from tests.checkpoints import make_checkpoint


def test_a_line_for_each_case_with_speedup_acceptance_and_equal_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "speculative", "--shapes", "tiny", "--methods", "ngram", "skip_layers_always", "--batch", "1",
                 "3", "--max-tokens", "24", "--repeat", "1", "--num-threads", "1"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [(line["method"], line["text"], line["batch"]) for line in lines] == [
        (method, text, batch) for method in ("ngram", "skip_layers_always") for text in ("repeating", "free")
        for batch in (1, 3)]
    for line in lines:
        assert line["same_tokens"]
        assert line["speedup"] > 0
        assert line["tokens_per_step"] >= 1.0
        assert line["commit"]
    assert all(line["drafts_per_step"] > 0 for line in lines if line["method"] == "skip_layers_always")


@pytest.mark.parametrize("given, said", [
    (["--batch", "1", "0"], "--batch must be at least 1"),
    (["--repeat", "0"], "--repeat must be at least 1"),
    (["--max-tokens", "0"], "--max-tokens must be at least 1"),
    (["--drafts", "-1"], "--drafts must be at least 1"),
    (["--acceptance", "0.5", "2"], "--acceptance must be between 0 and 1"),
    (["--batch", "100000"], "--batch must be at most 1024"),
    (["--temperature", "-1"], "--temperature must be at least 0"),
    (["--temperature", "nan"], "--temperature must be at least 0"),
    (["--config", '{"method": "ngrams"}'], "--config: speculative_config"),
    (["--config", "{}"], "--config: speculative_config needs a method"),
])
def test_numbers_that_cannot_be_measured_are_refused(capsys: pytest.CaptureFixture[str], given: list[str],
                                                     said: str) -> None:
    assert main(["bench", "speculative", "--shapes", "tiny", *given]) == 2
    found = capsys.readouterr()
    assert said in found.err and not found.out


def test_a_model_of_few_positions_is_measured_within_them(tmp_path: Path) -> None:
    for positions, length in ((256, 256), (4096, 2048)):
        make_checkpoint(tmp_path / str(positions), "llama", max_position_embeddings=positions)
        assert _length(str(tmp_path / str(positions))) == length


def test_a_draft_model_is_the_target_without_some_of_its_layers(tmp_path: Path) -> None:
    config = {**TINY, "num_hidden_layers": 6}
    weights = dict(dummy_weights(config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    assert write_dropped(resolve_model(str(tmp_path)), tmp_path / "half") == [0, 2, 4, 5]
    half = resolve_model(str(tmp_path / "half"))
    found = dict(half.weights())
    assert half.config["num_hidden_layers"] == 4
    assert len(found) == len(weights) - 2 * sum(".layers.0." in name for name in weights)
    name = "model.layers.{}.mlp.down_proj.weight"
    assert torch.equal(found[name.format(1)], weights[name.format(2)].half().float())
