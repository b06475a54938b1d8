"""`quire bench gpu --heads` on CPU tensors: drafts are right with the chances of their places, and change no token."""

from __future__ import annotations

import argparse

import pytest

from quire.bench.gpu import heads
from quire.bench.speculation.command import _TINY
from quire.ops.cpu import CpuOps


def test_drafts_are_right_as_often_as_their_places_say(monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(batch=[1, 6], repeat=1, max_tokens=150, device="cpu")
    lines = list(heads.measure(_TINY, "tiny", args, CpuOps(num_threads=1)))
    assert [(line["method"], line["batch"]) for line in lines] == [
        (method, batch) for method in ("head, always", "head, as it pays") for batch in (1, 6)]
    assert all(line["equal_tokens"] == 1.0 for line in lines)
    # 1 + 0.8 + 0.8 x 0.7 + ...: what comes of four drafts in every step.
    assert 2.5 < lines[1]["tokens_per_step"] < 3.2
    first, second, *_ = lines[1]["acceptance_by_position"]
    assert 0.72 < first < 0.88 and 0.44 < second < 0.68
    assert all("tokens a step" in heads.text(line) for line in lines)
