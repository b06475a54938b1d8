"""`quire bench route`: what it prints, and what it does with a trace that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.routing import route_cost
from quire.bench.routing.route_trace import prompt_of, read_trace
from quire.cli.main import main
from quire.errors import ConfigError


def write_trace(path: Path, requests: int = 60) -> Path:
    lines: list[dict[str, Any]] = []
    for number in range(requests):
        talk = number % 7
        blocks = [100 * talk + place for place in range(3 + number // 7)]
        lines.append({"timestamp": 1000 * number, "input_length": 512 * len(blocks), "output_length": 300,
                      "hash_ids": blocks})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_a_trace_in_simulated_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "trace.jsonl")
    assert main(["bench", "route", "--case", "simulated", "--trace", str(path), "--replicas", "4"]) == 0
    turns, aware, compared = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert turns["requests"] == 60 and turns["errors"] == 0
    assert aware["prefix_tokens"] > turns["prefix_tokens"] and compared["prefix_tokens"] > 1


def test_equal_blocks_are_equal_tokens(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.jsonl"), 10)
    assert len(trace) == 10
    assert prompt_of(trace[0], 0)[:48] == prompt_of(trace[7], 7)[:48] != prompt_of(trace[1], 1)[:48]


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad"
    file.write_text('{"timestamp": 1}\n')
    for path in (file, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            read_trace(path, 10)
    assert main(["bench", "route", "--case", "trace"]) == 1
    assert "--trace FILE" in capsys.readouterr().err


def test_the_delay_of_a_token_is_measured_through_a_real_router() -> None:
    found = route_cost.delay(streams=3, rate=300.0, tokens=5, rounds=1)
    assert found["tokens"] == 15 and found["direct_ms"] > 0 and found["routed_ms"] > 0
