"""`quire bench prefix-cache`: table, JSON lines, picture, and mistakes on one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    requests = [[0, 1 + i % 7, 100 + i % 7] for i in range(60)]
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in requests))
    return path


def test_the_table_has_a_row_per_capacity_and_a_column_per_policy(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prefix-cache", "--trace", str(trace), "--capacity", "20", "5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1] == ["capacity", "lru", "reuse-rate", "lru-2", "clairvoyant"]
    assert [line[0] for line in lines[2:]] == ["5", "20"]
    # 15 different blocks fit into 20: everybody finds all but the first use of each.
    assert lines[3][1:5] == [f"{1 - 15 / 180:.4f}"] * 4


def test_json_lines_carry_the_case_and_the_machine(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trace", str(trace), "--capacity", "20", "--policies", "lru", "--limit", "2", "--json"]
    assert main(["bench", "prefix-cache", *arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    case = json.loads(line)
    assert (case["bench"], case["policy"], case["capacity"], case["blocks"], case["hits"]) == (
        "prefix-cache", "lru", 20, 6, 1)
    assert case["hit_rate"] == pytest.approx(1 / 6, abs=1e-5) and case["cores"] >= 1 and case["commit"]


def test_a_picture_is_drawn_with_every_policy_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rates.svg"
    arguments = ["--workload", "loop", "--limit", "300", "--capacity", "100", "2000", "--plot", str(picture)]
    assert main(["bench", "prefix-cache", *arguments]) == 0
    drawn = picture.read_text()
    assert drawn.startswith("<svg") and "loop" in drawn
    assert all(f">{name}<" in drawn for name in ("lru", "reuse-rate", "clairvoyant", "2,000"))
    assert str(picture) in capsys.readouterr().out


def test_a_png_is_one(tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"
    arguments = ["--workload", "loop", "--limit", "100", "--capacity", "100", "--plot", str(picture)]
    assert main(["bench", "prefix-cache", *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "complaint"), [
    (["--capacity", "0"], "--capacity counts blocks"),
    (["--capacity", "5", "--limit", "0"], "--limit counts requests"),
    (["--capacity", "5", "--policies", "mru"], "mru"),
    (["--capacity", "5", "--plot", "no/such/folder/rates.svg"], "no folder no/such/folder"),
])
def test_wrong_arguments_are_refused_on_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["bench", "prefix-cache", "--trace", str(trace), *arguments]) != 0
    printed = capsys.readouterr()
    errors = printed.err.strip().splitlines()
    assert len(errors) == 1 and complaint in errors[0]
    assert not printed.out, "it began to measure"


def test_a_malformed_trace_is_refused_with_the_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text() + '{"hash_ids": 3}\n')
    assert main(["bench", "prefix-cache", "--trace", str(trace), "--capacity", "5"]) != 0
    assert "line 61" in capsys.readouterr().err
