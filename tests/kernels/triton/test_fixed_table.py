"""Which kernel a GEMM of deterministic mode gets by the table, and how the tuner fills it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.bench.gpu import tune_fixed  # noqa: E402
from quire.kernels.slices import Slices  # noqa: E402
from quire.kernels.triton import fixed_table, fixed_tiles, linear_prefetch  # noqa: E402
from quire.kernels.triton.fixed_table import FixedChoice  # noqa: E402
from quire.ops import triton as device_ops  # noqa: E402

ENTRIES = [
    {"rows": 8, "features": 128, "width": 512, "slices": 8, "kernel": "prefetch"},
    {"rows": 32, "features": 128, "width": 512, "slices": 8, "kernel": "fixed", "sizes": [64, 64, 64, 4, 4, 2]},
    {"rows": 256, "features": 128, "width": 512, "slices": 8, "kernel": "tiles", "sizes": [128, 4, 2, 0, 8]},
    {"rows": 64, "features": 128, "width": 512, "slices": 8, "kernel": "fixed"},
]


def ways(**us: tuple[float, float, str | None]) -> dict[str, Any]:
    return {name.replace("_", " "): {"us": time, "same": same}
            | ({} if kernel is None else {"kernel": kernel, "sizes": [1]}) for name, (time, same, kernel) in us.items()}


def test_the_fastest_that_gave_every_bit_is_taken() -> None:
    line = {"rows": 64, "features": 128, "width": 512, "slices": 8, "model": "0.6b",
            "ways": ways(torch=(1.0, 1.0, None), tiles_1=(2.0, 0.99999, "tiles"), fixed=(4.0, 1.0, "fixed"),
                         prefetch=(3.0, 1.0, "prefetch"))}
    assert tune_fixed.best(line) == {"rows": 64, "features": 128, "width": 512, "slices": 8, "kernel": "prefetch",
                                     "sizes": [1], "us": [3.0, 4.0]}
    assert tune_fixed.best({**line, "ways": ways(torch=(1.0, 1.0, None))}) is None


def test_a_table_grows_by_what_is_timed_later(tmp_path: Path) -> None:
    path = tmp_path / "fixed_table.json"
    fixed_table.write(path, ENTRIES[:2], device="a chip")
    newer = {**ENTRIES[1], "kernel": "prefetch", "sizes": []}
    fixed_table.write(path, [newer, *ENTRIES[2:]], device="another")
    read = json.loads(path.read_text())
    assert read == {"device": "another", "gemms": [ENTRIES[0], newer, ENTRIES[3], ENTRIES[2]]}
    fixed_table.write(tmp_path / "empty.json", [], device="a chip")
    assert json.loads((tmp_path / "empty.json").read_text()) == {"device": "a chip", "gemms": []}


def test_a_choice_for_many_rows_is_none_for_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_table, "table", lambda: fixed_table.parse(ENTRIES[2:3]))
    found = [fixed_table.lookup(rows, 128, 512, 8) for rows in (1, 8, 128, 129, 256, 9000)]
    assert found == 3 * [None] + 3 * [FixedChoice("tiles", (128, 4, 2, 0, 8))]
    assert fixed_table.lookup(256, 128, 512, 4) is None


def test_no_choice_is_shipped_that_nobody_has_timed() -> None:
    for entry in json.loads(Path(fixed_table.__file__).with_name("fixed_table.json").read_text())["gemms"]:
        assert len(entry["us"]) == 2


@pytest.mark.parametrize("early", [True, False])
def test_a_gemm_runs_by_the_entry_of_its_rows(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    """As on Hopper, with kernels that only note who was called."""
    called: list[Any] = []

    def noting(name: str) -> Any:
        def kernel(x: Any, *_: Any, **named: Any) -> Any:
            of = {key: value for key, value in named.items() if key in ("tiles", "sizes", "parts", "pdl")}
            called.append((name, x.shape[0], of))
            return x

        return kernel

    monkeypatch.setattr(fixed_table, "table", lambda: fixed_table.parse(ENTRIES))
    monkeypatch.setattr(linear_prefetch, "available", lambda device: True)
    monkeypatch.setattr(fixed_tiles, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(device_ops.fixed_tiles, "linear_fixed_tiles", noting("tiles"))
    monkeypatch.setattr(device_ops, "linear_fixed_prefetch", noting("prefetch"))
    monkeypatch.setattr(device_ops, "units_for", lambda *_: type("Any", (), {"fits": lambda *_: True})())
    monkeypatch.setattr(device_ops.linear_fixed, "linear_fixed", noting("fixed"))
    ops = device_ops.TritonOps("cpu", torch.bfloat16, deterministic=True, pdl=early)
    w = ops.pack_linear(torch.zeros(128, 512), None, Slices.of_width(512))
    for rows in (1, 8, 9, 33, 65, 256, 5000):
        ops.linear(torch.zeros(rows, 512, dtype=torch.bfloat16), w)
    tiles = {"tiles": fixed_tiles.FixedTiles(128, 4, 2, False, 8), "pdl": early}
    shape = {"sizes": device_ops.linear_fixed.FixedShape(64, 64, 64, 4, 4), "parts": 2}
    assert called == [("prefetch", 1, {"pdl": early}), ("prefetch", 8, {"pdl": early}), ("fixed", 9, shape),
                      ("fixed", 33, {}), ("tiles", 65, tiles), ("tiles", 256, tiles), ("tiles", 5000, tiles)]
    # A tile that the scratch has no room for.
    called.clear()
    ops._parts = linear_prefetch.PrefetchScratch.allocate("cpu", 1)
    ops.linear(torch.zeros(256, 512, dtype=torch.bfloat16), w)
    assert called == [("fixed", 256, {})]
    plain = device_ops.TritonOps("cpu", torch.bfloat16, deterministic=True, pdl=early, fixed_prefetch=False)
    called.clear()
    plain.linear(torch.zeros(256, 512, dtype=torch.bfloat16), w)
    assert called == [("fixed", 256, {})]


@pytest.mark.parametrize("there", [True, False])
def test_a_wide_gemm_runs_by_the_table_where_it_can_and_the_fixed_one_elsewhere(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """With slices, without, and with the gate, whose sums are rounded in between; never with a bias."""
    called: list[Any] = []
    sizes = {(128, 512, 8): (1, 128, 5, 2, 1, 1, 0, 0), (256, 512, 1): (1, 256, 4, 2, 1, 1)}
    known = {weight: [(64, FixedChoice("wide", each))] for weight, each in sizes.items()}
    wide = device_ops.wide_gemm

    def noting(x: Any, weight: Any, *_: Any, variant: Any, **named: Any) -> Any:
        called.append((variant.slices, variant.gated, variant.rounded, variant.shape, sorted(named)))
        return x.new_zeros(x.shape[0], weight.shape[0] // (2 if variant.gated else 1))

    def fixed(x: Any, weight: Any, *_: Any, **named: Any) -> Any:
        called.append("fixed")
        return x.new_zeros(x.shape[0], weight.shape[0])

    monkeypatch.setattr(fixed_table, "table", lambda: known)
    monkeypatch.setattr(fixed_table, "gates", lambda: {(256, 512, 1): known[256, 512, 1]})
    monkeypatch.setattr(linear_prefetch, "available", lambda device: True)
    monkeypatch.setattr(wide, "available", lambda device, dtype: there)
    monkeypatch.setattr(wide, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(wide, "linear_wide", noting)
    monkeypatch.setattr(device_ops.linear_fixed, "linear_fixed", fixed)
    monkeypatch.setattr(device_ops.activation, "act_mul", lambda x, kind, pdl: called.append("gate") or x)
    ops = device_ops.TritonOps("cpu", torch.bfloat16, deterministic=True, pdl=True)
    x = torch.zeros(64, 512, dtype=torch.bfloat16)
    gate_up = ops.pack_linear(torch.zeros(256, 512))
    ops.linear(x, ops.pack_linear(torch.zeros(128, 512), None, Slices.of_width(512)))
    ops.linear(x, gate_up)
    ops.gated_linear(x, gate_up, "silu")
    ops.gated_linear(x, gate_up, "gelu")
    ops.linear(x, ops.pack_linear(torch.zeros(256, 512), torch.zeros(256)))
    named = ["deep", "out", "pdl"]
    if there:
        whole = (1, False, False, wide.WideShape(1, 256, 4, 2), named)
        assert called == [(8, False, False, wide.WideShape(1, 128, 5, 2), named), whole,
                          (1, True, True, wide.WideShape(1, 256, 4, 2), named), whole, "gate", "fixed"]
    else:
        assert called == ["fixed", "fixed", "fixed", "gate", "fixed", "gate", "fixed"]


def test_a_gate_has_entries_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "fixed_table.json"
    entry = {"rows": 64, "features": 256, "width": 512, "slices": 1, "kernel": "tiles", "sizes": [1], "us": [1, 2]}
    gated = {**entry, "gate": True, "kernel": "wide"}
    fixed_table.write(path, [entry, gated])
    monkeypatch.setattr(fixed_table, "_entries", lambda: json.loads(path.read_text())["gemms"])
    fixed_table.table.cache_clear()
    fixed_table.gates.cache_clear()
    try:
        assert fixed_table.lookup(64, 256, 512, 1) == FixedChoice("tiles", (1,))
        assert fixed_table.lookup_gate(64, 256, 512) == FixedChoice("wide", (1,))
        assert fixed_table.lookup_gate(64, 256, 1024) is None
    finally:
        fixed_table.table.cache_clear()
        fixed_table.gates.cache_clear()


def test_of_a_gate_apart_is_an_answer_too() -> None:
    line = {"rows": 64, "features": 128, "width": 512, "slices": 1, "gate": True,
            "ways": ways(apart=(2.0, 1.0, "apart"), wide_1=(3.0, 1.0, "wide"))}
    assert tune_fixed.best(line) == {"rows": 64, "features": 128, "width": 512, "slices": 1, "gate": True,
                                     "kernel": "apart", "sizes": [1], "us": [2.0, 2.0]}


def test_a_weight_that_nobody_timed_has_no_choice() -> None:
    known = fixed_table.parse(ENTRIES)
    assert set(known) == {(128, 512, 8)} and [rows for rows, _ in known[128, 512, 8]] == [8, 32, 64, 256]
    assert known[128, 512, 8][0][1] == FixedChoice("prefetch")


@pytest.mark.parametrize("slices", [None, Slices.each(32, 128), Slices.each(16, 128), Slices.of_width(12_288),
                                    Slices.of_width(3072)])  # fmt: skip
@pytest.mark.parametrize("rows", [64, 256, 8192])
def test_every_tile_that_the_tuner_tries_can_run(rows: int, slices: Slices | None) -> None:
    width = 4096 if slices is None else slices.width
    weight = torch.empty(4096, width, dtype=torch.bfloat16, device="meta")
    for sizes in tune_fixed.hopper_tiles(rows, slices):
        tiles = fixed_tiles.FixedTiles.of(sizes)
        unit = fixed_tiles.unit_of(weight, slices, tiles)
        assert unit is not None and fixed_tiles.shared_bytes(tiles, unit) <= 227 << 10
