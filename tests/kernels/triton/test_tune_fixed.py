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


def test_a_gate_is_timed_apart_and_in_its_gemm_and_again_under_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GEMM in CUDA C has a stand-in. What is far behind is not timed again, and is out of the race."""
    from quire.kernels.triton.activation import act_mul
    from quire.kernels.triton.linear_fixed import linear_fixed

    def stand_in(x, weight, slices, shapes, deep=None, gated=False):
        if gated:
            for size in (1, 2):
                way = (lambda w: act_mul(linear_fixed(x, w), "silu")) if size == 1 else lambda w: x[:, :64] * 0
                yield f"wide {size}", fixed_table.FixedChoice("wide", (size,)), way

    short = iter((3e-6, 9e-6, 4e-6, 2e-6, 1e-6))
    tiny = {**qwen3(64, 1, 2, 64, False), "vocab_size": 256, "head_dim": 32, "num_key_value_heads": 2}
    for module in (tune, tune_fixed):
        monkeypatch.setattr(module, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(tune_fixed, "_wide", stand_in)
    monkeypatch.setattr(tune_fixed, "_library", lambda *_: iter(()))
    monkeypatch.setattr(tune_fixed, "_device", lambda: "none")
    monkeypatch.setattr(tune_fixed, "compile_all", lambda *_: None)
    monkeypatch.setattr(tune_fixed, "graph_seconds", lambda calls, repeats: next(short))
    monkeypatch.setattr(tune_fixed, "sustained_seconds", lambda calls, seconds: 5e-6 * seconds)
    path = tmp_path / "table.json"
    given = ["--models", "tiny", "--rows", "64", "--weights", "2", "--write", str(path), "--sustained", "2"]
    monkeypatch.setattr(sys, "argv", ["tune_fixed", *given, "--only", "fixed 64 64", "fixed 64 128"])
    with interpreting():
        tune_fixed.main()
    gemm, gate = (json.loads(line)["ways"] for line in capsys.readouterr().out.splitlines())
    assert [(way["short_us"], way["us"], "kernel" in way) for way in gemm.values()] == [(3, 10, True), (9, 9, False)]
    assert {name: (way["us"], way["same"] == 1.0) for name, way in gate.items()} == {
        "apart": (4, True), "wide 1": (10, True), "wide 2": (10, False)}  # fmt: skip
    # The stand-in that is wrong was the fastest: it puts nobody out of the race and is not in the table.
    entries = json.loads(path.read_text())["gemms"]
    assert [(entry.get("gate"), entry["kernel"], entry["sizes"]) for entry in entries] == [
        (None, "fixed", [64, 64, 64, 4, 4, 1]), (True, "wide", [1])]  # fmt: skip


@pytest.mark.parametrize(("count", "queries", "before"), [(2, 1, 70), (2, 40, 30)])
def test_attention_is_timed_by_every_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, queries: int, before: int
) -> None:
    mixed = attention_mixed.mixed_attention  # Triton's interpreter knows no early launch
    monkeypatch.setattr(attention_mixed, "mixed_attention", lambda *args, pdl=False, **named: mixed(*args, **named))
    earlier = ("tables", "rows", "tile_seq", "tile_first", "query_start", "context_len", "k_cache", "v_cache", "slots",
               "positions", "rope", "q_norm", "k_norm")  # fmt: skip
    with interpreting(constant=earlier):
        line = tune_fixed_attention.measure(32, count, queries, before)
    assert capsys.readouterr().err == ""
    other = {"once of 64"} if queries == 1 else {"wide", "prefill of 64"}
    same = {"once 2", "once 3", "paged 3 1", "paged 2 1", "paged 1 1", "paged 1 2"} if queries == 1 else {"prefill"}
    turned = {f"{how} {sizes}" for how in ("apart", "turned") for sizes in ("3 1", "1 2")} | {"plain"}
    assert set(line["ways"]) == {"mixed", "mixed early"} | same | other | (turned if queries == 1 else set())
    for name, way in line["ways"].items():  # the interpreters sum in another order than each other
        exact = name.startswith(("mixed", "once ", "apart")) and name not in other
        assert way["same"] == 1.0 if exact else way["off"] < 0.02
