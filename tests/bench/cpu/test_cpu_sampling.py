"""The share of a step that sampling takes, over a tiny model."""

from __future__ import annotations

from quire.bench.cpu import sampling as cpu_sampling
from quire.bench.gpu.cases import qwen3


def test_every_setting_has_its_share_of_a_step() -> None:
    config = {**qwen3(32, 1, 4, 48, True), "vocab_size": 300, "num_key_value_heads": 2, "head_dim": 8}
    lines = list(cpu_sampling.measure(config, rows=3, tokens=2, repeat=1))
    assert [line["setting"] for line in lines] == list(cpu_sampling.SETTINGS)
    assert all(line["sampling_ms"] > 0 and line["step_ms"] > 0 and line["share"] > 0 for line in lines)
