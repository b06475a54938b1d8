"""`quire bench speculative --shapes`: known text, drafts that are right as often as asked; here on CPU tensors."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from quire.bench.speculation.command import _TINY
from quire.bench.speculation.known_text import PERIOD, KnownText
from quire.bench.speculation.shapes import run_shapes
from quire.ops.cpu import CpuOps

CONFIG = _TINY


def lines_of(capsys: pytest.CaptureFixture[str], configs: dict[str, Any], **changes: Any) -> tuple[int, list[Any]]:
    values = {"device": "cpu", "shapes": "tiny", "batch": [1, 3], "max_tokens": 40, "repeat": 1,
              "acceptance": [0.0, 0.5, 1.0], "drafts": [4], **changes}
    code = run_shapes(CONFIG, argparse.Namespace(**values), configs, {"machine": "this"}, CpuOps(num_threads=1))
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]


def test_known_drafts_are_kept_as_often_as_asked_for_and_change_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = lines_of(capsys, {"known": {}})
    assert code == 0
    assert [(line["method"], line["batch"]) for line in lines] == [
        (f"known {share}", batch) for share in ("0", "0.5", "1") for batch in (1, 3)]
    assert all(line["equal_tokens"] == 1.0 for line in lines)
    assert [line["acceptance"] for line in lines[:2]] == [0.0, 0.0]
    assert [line["tokens_per_step"] for line in lines[4:]] == [pytest.approx(5.0, abs=0.2)] * 2
    assert 1.2 < lines[3]["tokens_per_step"] < 2.8
    assert len(lines[0]["acceptance_by_position"]) == 4


def test_lookups_find_what_repeats_and_are_misled_where_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = lines_of(capsys, {"ngram": {"method": "ngram", "adaptive": False}}, batch=[2])
    assert code == 0
    by_text = {line["text"]: line for line in lines}
    assert by_text["repeating"]["tokens_per_step"] > 4
    assert by_text["free"]["drafts_per_step"] == 0
    assert by_text["misleading"]["drafts_per_step"] > 4
    assert by_text["misleading"]["acceptance"] == 0.0
    assert all(line["equal_tokens"] == 1.0 for line in lines)


@pytest.mark.parametrize("method", ["skip_layers", "draft_model"])
def test_a_model_that_proposes_the_known_text_is_always_right(capsys: pytest.CaptureFixture[str], method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    code, lines = lines_of(capsys, {method: config}, batch=[2])
    assert code == 0
    assert len(lines) == 3
    assert [line["acceptance"] for line in lines] == [1.0] * 3
    assert all(line["equal_tokens"] == 1.0 and line["tokens_per_step"] > 3.5 for line in lines)


def test_what_fails_is_told_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = lines_of(capsys, {"broken": {"method": "no such"}, "known": {}}, batch=[1], acceptance=[1.0])
    assert code == 1
    assert ["error" in line for line in lines] == [True] * 3 + [False]


def test_the_text_follows_itself_in_circles_below_and_counts_above() -> None:
    text = KnownText(200)
    assert sorted(text.after(token) for token in range(200)) == list(range(200))
    assert text.following(0, PERIOD)[-1] == 0
    assert len(set(text.prompt("free", 90, 1, 10))) == 90
