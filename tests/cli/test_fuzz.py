"""`quire fuzz`: passes on a right engine, and turns a failure into a small case that can be replayed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.fuzz.case import FuzzCase, random_case
from quire.fuzz.fault_case import random_fault_case
from tests.cli.conftest import Done


def test_cases_of_a_seed_pass(inside: Callable[..., Done]) -> None:
    done = inside("fuzz", "--seed", "3", "--cases", "2")
    assert done.code == 0 and "28 cases" in done.out and "no difference" in done.out


def test_cases_with_faults_can_be_played_alone_and_replayed(inside: Callable[..., Done]) -> None:
    done = inside("fuzz", "--kind", "faults", "--seed", "3", "--cases", "5")
    assert done.code == 0 and "5 cases" in done.out
    case = random_fault_case(4)
    assert "passes" in inside("fuzz", "--replay", case.to_json()).out
    case.options["num_blocks"] = 1
    failing = inside("fuzz", "--replay", case.to_json())
    assert failing.code == 1 and "FAILED" in failing.out


def test_no_time_plays_no_case(inside: Callable[..., Done]) -> None:
    done = inside("fuzz", "--seconds", "0")
    assert done.code == 0 and done.out.startswith("0 cases")


def test_a_case_can_be_replayed_from_a_file_and_from_its_text(
    tmp_path: Path, inside: Callable[..., Done]
) -> None:
    text = random_case(11).to_json()
    (tmp_path / "case.json").write_text(text)
    for argument in (text, str(tmp_path / "case.json")):
        done = inside("fuzz", "--replay", argument)
        assert done.code == 0 and "passes" in done.out


def test_a_failing_replay_exits_with_1(inside: Callable[..., Done]) -> None:
    case = random_case(11)
    case.requests[0].prompt = [10**6]
    done = inside("fuzz", "--replay", case.to_json())
    assert done.code == 1 and "FAILED" in done.out and "1000000" in done.out


def test_a_failure_is_shrunk_and_printed_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, inside: Callable[..., Done]
) -> None:
    def find_difference(case: FuzzCase, workdir: Path) -> str | None:
        long = [r.name for r in case.requests if len(r.prompt) > 8]
        return f"{long[0]} is too long" if long else None

    monkeypatch.setattr("quire.fuzz.run.find_difference", find_difference)
    done = inside("fuzz", "--seed", "1", "--cases", "50")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].startswith("FAILED: case ")
    printed = next(line for line in lines if line.startswith("{"))
    case = FuzzCase.from_json(printed)
    assert len(case.requests) == 1 and 8 < len(case.requests[0].prompt) <= 17
    replay = next(line.strip() for line in lines if "--replay" in line)
    words = shlex.split(replay)
    assert words[:3] == ["quire", "fuzz", "--replay"] and json.loads(words[3]) == json.loads(printed)
    assert inside(*words[1:]).code == 1
    seeded = next(line.strip() for line in lines if "--seed" in line)
    assert inside(*shlex.split(seeded)[1:]).code == 1
