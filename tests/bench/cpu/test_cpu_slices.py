"""`quire bench cpu --slices` measures each GEMM of a layer, those with slices both ways."""

from __future__ import annotations

from quire.bench.cpu.slices import ROWS, slice_costs
from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec
from quire.models.spec import LayerSpec


def test_each_number_of_rows_has_the_layers_time_with_and_without_slices() -> None:
    layer = LayerSpec(AttentionSpec(3, 1, 32, 0.1), MlpSpec(320, "silu"), NormSpec("rms", 1e-6))
    lines = list(slice_costs(layer, hidden=96, seconds=0.02))
    assert [line["rows"] for line in lines] == list(ROWS)
    for line in lines:
        assert line["format"] == "scaled4"
        assert [len(line[f"{name}_us"]) for name in ("qkv", "up", "out", "down")] == [1, 1, 2, 2]
        shared = line["qkv_us"][0] + line["up_us"][0]
        assert abs(line["with_us"] - shared - line["out_us"][0] - line["down_us"][0]) < 0.5
        assert abs(line["without_us"] - shared - line["out_us"][1] - line["down_us"][1]) < 0.5
