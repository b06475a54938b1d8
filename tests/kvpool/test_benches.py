"""`quire bench pool` and `quire bench kv-benefit`: what they print follows from what they are given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.kvpool.benefit import Network
from quire.sim.replicas import Arrival, Fleet, read_arrivals, run_fleet

SMALL = Fleet(replicas=4, device_tokens=64 * 256, pool_tokens=1000 * 256, output_tokens=2)


def conversations(count: int = 6, turns: int = 4) -> list[Arrival]:
    """Each turn has all that was said before, and comes to the next replica."""
    return [Arrival(10.0 * (turn * count + talk), [talk * 7 + position % 97 for position in range(512 * (turn + 1))])
            for turn in range(turns) for talk in range(count)]


def test_replicas_with_a_pool_find_what_the_others_computed() -> None:
    arrivals = conversations()
    alone = run_fleet(dataclasses.replace(SMALL, pool_tokens=0), arrivals)
    shared = run_fleet(SMALL, arrivals)
    assert alone.requests == shared.requests == len(arrivals) and alone.prompt_tokens == shared.prompt_tokens
    assert alone.pool_tokens == 0 and shared.pool_tokens > 0 and shared.hit_rate > alone.hit_rate
    assert shared.mean_first_token < alone.mean_first_token
    again = run_fleet(SMALL, arrivals)
    assert again == shared  # simulated time has no noise


def test_over_a_slow_network_nothing_is_fetched() -> None:
    slow = run_fleet(dataclasses.replace(SMALL, network=Network(0.5)), conversations())
    assert slow.pool_tokens == 0 and slow.units_written == 0
    all_the_same = run_fleet(dataclasses.replace(SMALL, network=Network(0.5), policy="all"), conversations())
    assert all_the_same.pool_tokens > 0 and all_the_same.mean_first_token > slow.mean_first_token


def test_a_trace_is_read_at_its_scale(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * i, "input_length": 1000, "output_length": 5, "hash_ids": [0, i]} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arrivals = read_arrivals(trace, 2, scale=2, speed=2.0)
    assert [len(arrival.prompt) for arrival in arrivals] == [500, 500] and [a.at for a in arrivals] == [0.0, 0.5]
    assert arrivals[0].prompt[:256] == arrivals[1].prompt[:256] and arrivals[0].prompt != arrivals[1].prompt


def test_the_commands_print_what_they_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [0, 1]}))
    assert main(["bench", "pool", "--trace", str(trace), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [case["case"] for case in found] == ["no pool", "pool", "pool, all kept"]
    picture = tmp_path / "benefit.svg"
    shape = ["--shape", "32", "32", "128", "2", "--prefill-rate"]
    assert main(["bench", "kv-benefit", *shape, "2000", "--json", "--plot", str(picture)]) == 0
    cells: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (cell,) = [each for each in cells if each["tokens"] == 1024 and each["gbits"] == 100.0]
    assert cell["fetch_ms"] == 42.955 and cell["pool_wins"] and "<svg" in picture.read_text()
    assert main(["bench", "kv-benefit", *shape, "40000"]) == 0
    assert "LOSES" in capsys.readouterr().out
    assert main(["bench", "kv-benefit", "--shape", "1", "1", "1", "1"]) != 0
