"""`quire bench offload`: a line of JSON for each way in which KV comes, and streams that go on beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.figures.pictures import _MODEL
from quire.cli.main import main


def test_every_way_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL | {"max_position_embeddings": 2048}))
    options = ["--model", str(tmp_path), "--load-format", "dummy", "--prefix-tokens", "400", "--streams", "2",
               "--repeats", "2", "--num-threads", "1"]
    assert main(["bench", "offload", *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = {line["mode"]: line for line in map(json.loads, (line for line in printed if line.startswith("{")))}
    assert list(lines) == ["quiet", "beside", "inside"]
    assert lines["quiet"]["first_token_ms"] is None and lines["quiet"]["fetched_tokens"] == 0
    for mode in ("beside", "inside"):
        assert lines[mode]["fetched_tokens"] == 400 and lines[mode]["first_token_ms"] > 0
    for line in lines.values():
        assert 0 < line["gap_ms_median"] <= line["gap_ms_max_median"] <= line["gap_ms_max"]


def test_a_prefix_longer_than_the_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL))
    assert main(["bench", "offload", "--model", str(tmp_path), "--load-format", "dummy",
                 "--prefix-tokens", "999999"]) != 0
    assert "--prefix-tokens 999999" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "said"), [
    (["--streams", "4", "--max-num-seqs", "4"], "--streams 4"),  # it waited for ever
    (["--prefix-tokens", "15"], "--prefix-tokens 15"),
])
def test_a_load_that_measures_nothing_is_refused(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL | {"max_position_embeddings": 2048}))
    assert main(["bench", "offload", "--model", str(tmp_path), "--load-format", "dummy", "--repeats", "1",
                 "--num-threads", "1", "--prefix-tokens", "100", *options]) != 0
    assert said in capsys.readouterr().err
