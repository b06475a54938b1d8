"""`quire bench pressure`: a line of JSON for each pool and mode, the same tokens in all, and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench.figures.pictures import _MODEL
from quire.cli.main import main


def test_every_pool_and_mode_has_its_line_and_the_picture_is_a_png(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MODEL))
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(tmp_path), "--load-format", "dummy", "--requests", "6", "--prompt-tokens", "16", "40",
               "--output-tokens", "8", "24", "--swap-gib", "0.01", "--repeats", "1", "--shares", "1", "0.1"]
    assert main(["bench", "pressure", *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    assert [(line["share"], line["mode"]) for line in lines] == [
        (share, mode) for share in (1.0, 0.1) for mode in ("recompute", "swap", "auto")]
    for line in lines:
        assert line["output_tok_s"] > 0 and 0 < line["completion_s_mean"] <= line["completion_s_max"]
        assert (line["preemptions"] > 0) == (line["share"] < 1)
    assert lines[4]["swaps_out"] == lines[4]["preemptions"] and lines[4]["swap_bytes_out"] > 0
    assert (tmp_path / "pressure.png").read_bytes().startswith(b"\x89PNG") and printed[-1] == "picture: pressure.png"


def test_a_picture_that_could_not_be_written_is_refused_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pressure", "--plot", "/no/such/folder/a.png"]) != 0
    assert "no such folder" in capsys.readouterr().err
