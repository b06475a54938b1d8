"""`quire eval` prints one JSON line per task, and refuses what it cannot do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import QuireError
from quire.eval import command, data


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_one_line_says_what_was_asked_and_how_it_went(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two_passages(name: str, cache_dir: object) -> Iterator[dict[str, Any]]:
        context = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.\n" * 2 + "Monday, Tuesday,"
        yield {"request": {"context": context, "continuation": " Wednesday"}}
        yield {"request": {"context": context, "continuation": " banana"}}

    monkeypatch.setattr(data, "rows", two_passages)
    assert command.run(parsed("lambada", "--model", smollm2, "--max-model-len", "256")) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (line["eval"], line["model"], line["questions"], line["acc"]) == ("lambada", smollm2, 2, 0.5)
    assert line["perplexity"] > 1


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(QuireError, match="--limit"):
        command.run(parsed("gsm8k", "--limit", "-1"))


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(SystemExit):
        parsed("mmlu")
