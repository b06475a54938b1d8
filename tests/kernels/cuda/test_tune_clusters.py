"""What times decode attention in clusters, with another kernel in their place and no clock: every way is compared and
timed, and one that fails is left out."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.bench.gpu import tune, tune_clusters  # noqa: E402


class Layers:
    """What is timed: a number of calls."""

    def __init__(self, model: str, count: int, keys: int) -> None:
        self.qkv, self.calls = None, list[tuple[str, Any]]()
        found.append(self)

    def attend(self, sizes: Any, qkv: Any, layer: int) -> Any:
        if sizes == (4, 8):
            raise RuntimeError("no room for such clusters")
        self.calls.append(("attention", sizes))
        return torch.ones(2) if sizes is None else torch.full((2,), 1.5)

    def layer(self, sizes: Any, layer: int) -> None:
        self.calls.append(("layer", sizes))


found: list[Layers] = []


@pytest.mark.parametrize(("count", "timed"), [(1, "layer"), (4, "attention")])
def test_every_way_is_compared_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, timed: str
) -> None:
    def seconds(ways: list[list[Any]], rounds: int) -> list[float]:
        for calls in ways:
            for call in calls:
                call()
        return [1e-6 * (index + 1) for index in range(len(ways))]

    found.clear()
    monkeypatch.setattr(tune_clusters, "_Layers", Layers)
    monkeypatch.setattr(tune, "graphs_seconds", seconds)
    line = tune_clusters.measure("0.6b", count, 384)
    ways = ["few", *(f"{a} {b}" for a, b in tune_clusters.SIZES if (a, b) != (4, 8))]
    assert line["timed"] == timed and list(line["us"]) == ways and line["us"]["few"] == 1.0
    assert line["off"] == {name: 0.0 if name == "few" else 0.5 for name in ways}
    assert found[0].calls.count((timed, (8, 4))) == tune_clusters._LAYERS + (timed == "attention")
    assert "no room for such clusters" in capsys.readouterr().err
