"""What summing in slices costs on a CPU: the GEMMs of one decoder layer, with slices and without, in turns.

On one thread, in CPU time: what others do on a busy machine then hardly shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.slices import Slices
from quire.models.spec import LayerSpec, MoeSpec
from quire.ops.cpu import CpuOps
from quire.ops.cpu_panels import PanelLinear

ROWS = (1, 3, 32, 512)
_SECONDS = 3.0
"""For each number of rows."""


def slice_costs(layer: LayerSpec, hidden: int, seconds: float = _SECONDS) -> Iterator[dict[str, Any]]:
    """For each number of rows, the shortest time of each GEMM in microseconds; for those with slices, both ways."""
    ops = CpuOps(num_threads=1)
    heads, kv_heads, dim = layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim
    mlp = layer.mlp
    if isinstance(mlp, MoeSpec):
        raise ConfigError("this bench times a dense MLP: name a model without experts", field="model")
    up = mlp.intermediate * (2 if mlp.gated else 1)
    plain = {"qkv": ((heads + 2 * kv_heads) * dim, hidden), "up": (up, hidden)}
    sliced = {"out": Slices.of_heads(heads, dim), "down": Slices.of_width(mlp.intermediate)}
    weights = {name: [ops.pack_linear(_weight(n, k))] for name, (n, k) in plain.items()}
    for name, slices in sliced.items():
        weight = _weight(hidden, slices.width)
        weights[name] = [ops.pack_linear(weight, None, slices), ops.pack_linear(weight)]
    for rows in ROWS:
        best = {name: _shortest(ops, rows, ways, seconds / len(weights)) for name, ways in weights.items()}
        with_slices, without = (sum(times[way] for times in best.values()) for way in (0, -1))
        yield {
            "rows": rows, "format": weights["down"][0].format,
            "with_us": round(with_slices, 1), "without_us": round(without, 1),
            "cost": round(with_slices / without - 1, 4),
            **{f"{name}_us": [round(each, 1) for each in times] for name, times in best.items()},
        }  # fmt: skip


def _shortest(ops: CpuOps, rows: int, ways: list[PanelLinear], seconds: float) -> list[float]:
    x = torch.randn(rows, ways[0].in_features)
    best = [float("inf")] * len(ways)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for index, packed in enumerate(ways):
            start = time.thread_time()
            ops.linear(x, packed)
            best[index] = min(best[index], 1e6 * (time.thread_time() - start))
    return best


def _weight(features: int, width: int) -> Tensor:
    """A weight that a 4-bit checkpoint could hold, where its width allows groups of 32."""
    quanta = torch.randint(0, 16, (features, -(-width // 32), 32)).float()
    quanta[..., 0], quanta[..., 1] = 0, 15
    return (quanta * 2**-8 - 2**-5).reshape(features, -1)[:, :width].contiguous()
