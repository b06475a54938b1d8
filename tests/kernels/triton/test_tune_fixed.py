"""What times the kernels of deterministic mode, with interpreters for a chip and no clock: every way runs and gives
what the one in use gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.bench.gpu import tune, tune_fixed, tune_fixed_attention  # noqa: E402
from quire.bench.gpu.cases import qwen3  # noqa: E402
from quire.kernels.triton import attention_mixed, fixed_prefetch, fixed_table, fixed_tiles, hopper_prefill  # noqa: E402
from tests.kernels.triton.gluon_interpreter import interpreting  # noqa: E402


@pytest.fixture(autouse=True)
def no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreters stand in for a chip")
    torch.manual_seed(1)
    for module in (tune_fixed, tune_fixed_attention):
        monkeypatch.setattr(module, "_DEVICE", "cpu")
        monkeypatch.setattr(module, "_LEAST_BYTES", 1.0)
        monkeypatch.setattr(module, "graph_seconds", lambda calls, repeats: [call() for call in calls] and 1e-6)
    from quire.kernels.triton import linear_prefetch

    for module in (fixed_tiles, fixed_prefetch, hopper_prefill, linear_prefetch):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 4)


def test_gemms_are_timed_by_every_way_and_the_fastest_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {**qwen3(128, 1, 8, 1024, False), "vocab_size": 256, "head_dim": 64, "num_key_value_heads": 8}
    for module in (tune, tune_fixed):
        monkeypatch.setattr(module, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(tune_fixed, "_library", lambda *_: iter(()))
    monkeypatch.setattr(tune_fixed, "_device", lambda: "none")
    monkeypatch.setattr(tune_fixed, "compile_all", lambda *_: None)
    path = tmp_path / "table.json"
    given = ["--models", "tiny", "--rows", "1", "64", "--weights", "1", "3", "--write", str(path)]
    monkeypatch.setattr(sys, "argv", ["tune_fixed", *given, "--only", "fixed 6", "tiles", "prefetch"])
    with interpreting():
        tune_fixed.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["rows"], line["slices"]) for line in lines] == [(1, 8), (64, 8), (1, 8), (64, 8)]
    kinds = [{name.split()[0] for name in line["ways"]} for line in lines]
    assert kinds == 2 * [{"prefetch"}, {"fixed", "tiles"}]
    known = fixed_table.parse(json.loads(path.read_text())["gemms"])
    assert set(known) <= {(128, 512, 8), (128, 1024, 8)}


@pytest.mark.parametrize(("count", "queries", "before"), [(2, 1, 70), (2, 40, 30)])
def test_attention_is_timed_by_every_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, queries: int, before: int
) -> None:
    mixed = attention_mixed.mixed_attention  # Triton's interpreter knows no early launch
    monkeypatch.setattr(attention_mixed, "mixed_attention", lambda *args, pdl=False, **named: mixed(*args, **named))
    with interpreting():
        line = tune_fixed_attention.measure(32, count, queries, before)
    assert capsys.readouterr().err == ""
    fast = {name for name in line["ways"] if name.startswith(("fast", "wide"))}
    decode = {"once 2", "once 3", "once 4"} if queries == 1 else {"prefill"}
    assert set(line["ways"]) - {"mixed", "mixed early"} - fast == decode and "mixed" in line["ways"]
    assert bool(fast) == (queries > 1)
    for name, way in line["ways"].items():
        assert way["same"] == 1.0 or (name in {"prefill", *fast} and way["off"] < 0.02)
