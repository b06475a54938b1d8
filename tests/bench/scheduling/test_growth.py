"""Costs that must not grow with queues and prompts do not, counted in operations."""

from __future__ import annotations

import argparse

import pytest

from quire.bench.scheduling.growth import ROWS, Row, counted
from quire.bench.scheduling.scheduler import add_arguments, run


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_cost_does_not_grow(row: Row) -> None:
    (small, large), _ = row.growth([1024, 8192])
    assert large <= 1.05 * small + 200  # a binary search costs a few comparisons more


def test_what_grows_would_be_seen() -> None:
    def work(size: int) -> int:
        with counted() as count:
            sum(i for i in range(size))
        return count.operations

    assert work(8192) > 4 * work(1024)


def test_the_command_prints_a_row_for_each_cost(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--growth", "--sizes", "1024", "2048"])) == 0
    printed = capsys.readouterr().out
    for row in ROWS:
        assert row.name in printed
