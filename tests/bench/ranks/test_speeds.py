"""Engines take turns; a ratio is that of one round, and rounds in which others computed do not count."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from quire.bench.processor_time import Taken
from quire.bench.ranks import figures, speeds
from quire.bench.ranks.speeds import Run, compared
from quire.cli.main import main

QUIET, BUSY = Taken(0.001, 0.0), Taken(0.2, 0.0)


def test_the_median_of_the_rounds_ratios_counts() -> None:
    one = [Run(10.0, QUIET), Run(20.0, QUIET), Run(10.0, QUIET)]
    line = compared([Run(10.0, QUIET), Run(25.0, QUIET), Run(11.0, QUIET)], one)
    assert line["ratios"] == [1.0, 0.8, 0.909]
    assert line["speed_to_one_process"] == 0.909 and line["undisturbed_rounds"] == 3


def test_a_round_counts_if_neither_run_was_disturbed() -> None:
    one = [Run(10.0, QUIET), Run(10.0, BUSY), Run(10.0, QUIET), Run(10.0, QUIET)]
    mine = [Run(20.0, BUSY), Run(5.0, QUIET), Run(10.0, QUIET), Run(12.5, QUIET)]
    line = compared(mine, one)
    assert line["undisturbed_rounds"] == 2 and line["speed_to_one_process"] == 0.9
    assert line["seconds"] == [20.0, 5.0, 10.0, 12.5]


def test_where_all_were_disturbed_it_says_so_and_takes_them_all() -> None:
    line = compared([Run(12.0, BUSY), Run(10.0, QUIET)], [Run(6.0, QUIET), Run(10.0, BUSY)])
    assert line["undisturbed_rounds"] == 0 and line["speed_to_one_process"] == 0.75


class _FakeEngine:
    """Stands for a process with an engine; `seconds` by size."""

    seconds: dict[str, list[float]]
    turns: list[str]
    tokens: dict[str, list[int]]

    def __init__(self, engine: str, case: str, model: str, options: dict[str, Any]) -> None:
        self.options = options
        self.size = f"{options.get('tensor_parallel_size', 1)}x{options.get('pipeline_parallel_size', 1)}"
        self.turns.append(f"load {self.size}")

    def __enter__(self) -> _FakeEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.turns.append(f"end {self.size}")

    @property
    def pid(self) -> int:
        return 2**30

    def run(self) -> float:
        self.turns.append(self.size)
        return self.seconds[self.size].pop(0)

    def finish(self) -> dict[str, Any]:
        return {"kv_pool_bytes": 5, "preemptions": 1, "tokens": self.tokens.get(self.size, [1, 2])}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[_FakeEngine]:
    class Fake(_FakeEngine):
        pass

    Fake.turns, Fake.tokens = [], {}
    monkeypatch.setattr(speeds, "CaseProcess", Fake)
    taken: Callable[..., Taken] = lambda *given: QUIET  # noqa: E731
    monkeypatch.setattr("quire.bench.processor_time.ProcessorWatch.taken", taken)
    return Fake


def test_every_size_runs_once_in_each_round_beside_one_process(fake: type[_FakeEngine]) -> None:
    fake.seconds = {"1x1": [8.0, 9.0], "1x2": [10.0, 9.0]}
    fake.tokens = {"1x2": [3]}
    lines = list(speeds.speeds("B", "some", "dummy", ["1x1", "1x2"], 2))
    assert fake.turns == ["load 1x1", "load 1x2", "1x1", "1x2", "1x1", "1x2", "end 1x2", "end 1x1"]
    assert [(line["round"], line["size"], line["seconds"], line["disturbed"]) for line in lines[:4]] == [
        (1, "1x1", 8.0, False), (1, "1x2", 10.0, False), (2, "1x1", 9.0, False), (2, "1x2", 9.0, False)]
    assert [line["speed_to_one_process"] for line in lines[4:]] == [1.0, 0.9]
    assert [line["same_tokens"] for line in lines[4:]] == [True, False]


def test_figures_hold_each_size_to_its_limit_but_not_one_process(fake: type[_FakeEngine],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    fake.seconds = {"1x1": [8.4] * 100, "2x1": [10.0] * 100, "1x2": [8.0] * 100}
    for name in ("control_plane", "exchange_times"):
        monkeypatch.setattr(figures, name, lambda *given: {"median": 1.0})
    monkeypatch.setattr(figures, "rank_memory", lambda *given: [])
    lines = [line for line in figures.figures() if "speed_to_one_process" in line]
    assert {(line["size"], line.get("holds")) for line in lines} == {("1x1", None), ("2x1", False), ("1x2", True)}
    assert sum(line["size"] == "1x2" for line in lines) == 2, "in B, of both models"


def test_a_real_model_runs_in_turns_with_the_same_tokens(dummy_model: str) -> None:
    lines = list(speeds.speeds("A", dummy_model, "dummy", ["1x2"], 1))
    runs, sizes = lines[:2], lines[2:]
    assert [line["size"] for line in runs] == [line["size"] for line in sizes] == ["1x1", "1x2"]
    assert all(line["seconds"] > 0 and 0 <= line["others"] <= 1 and line["stolen"] >= 0 for line in runs)
    assert all(line["same_tokens"] for line in sizes)
    assert sizes[1]["ratios"] == [pytest.approx(runs[0]["seconds"] / runs[1]["seconds"], abs=0.01)]


@pytest.mark.parametrize("word", ["2", "0x1", "x2", "2x", "2x1x1", "-1x2"])
def test_what_is_no_size_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("bench", "parallel", "--ranks", "--cases", "A", f"--sizes={word}")) != 0
    assert f"'{word}' is not a size" in capsys.readouterr().err
