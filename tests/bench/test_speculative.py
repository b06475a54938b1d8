"""`quire bench speculative` prints a line per method, text and batch, and notices tokens that differ."""

from __future__ import annotations

import json

import pytest

from quire.cli.main import main


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
