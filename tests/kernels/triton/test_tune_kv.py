"""What times attention over fp8, with interpreters for a chip and no clock: every way runs and gives about what bf16
gives."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.bench.gpu import tune_kv  # noqa: E402
from quire.kernels.triton import hopper_prefill, linear_prefetch  # noqa: E402
from tests.kernels.triton.gluon_interpreter import interpreting  # noqa: E402


@pytest.mark.parametrize(("count", "queries", "before"), [(2, 1, 290), (1, 40, 90)])
def test_attention_is_timed_by_every_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, queries: int, before: int
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreters stand in for a chip")
    torch.manual_seed(1)
    monkeypatch.setattr(tune_kv, "_DEVICE", "cpu")
    monkeypatch.setattr(tune_kv, "_LEAST_BYTES", 1.0)
    monkeypatch.setattr(tune_kv, "SHORT_SIZES", tune_kv.SHORT_SIZES[:2])
    monkeypatch.setattr(tune_kv, "graph_seconds", lambda calls, repeats: [call() for call in calls] and 1e-6)
    for module in (hopper_prefill, linear_prefetch):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 4)
    with interpreting():
        line = tune_kv.measure(32, count, queries, before)
    assert capsys.readouterr().err == ""
    assert set(line["ways"]) == {"bf16", "fp8"} | ({"unpack", "tiles"} if queries > 1 else {"64 4 3 1", "64 4 3 4"})
    assert all(way["off"] < 0.02 for name, way in line["ways"].items() if name != "unpack")
