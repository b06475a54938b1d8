"""What a token costs in the layers and in the head, measured, beside what the stages of a pipeline are dealt by."""

from __future__ import annotations

import time
from typing import Any

_REPEATS = 40
_BLOCK = 16


def layer_times(model: str, load_format: str, rows: int) -> dict[str, Any]:
    """Milliseconds of one decoding step of `rows` sequences on one thread: of each layer and of the head the fastest of
    many times, so that a busy machine changes little."""
    import torch

    from quire.config import EngineConfig
    from quire.engine.assembly.source import open_source
    from quire.models.build import build_decoder, dummy_weights
    from quire.models.shard import layer_costs
    from quire.ops.cpu import CpuOps
    from quire.scheduler.plan import PlanEntry
    from quire.worker.request_table import RequestTable
    from quire.worker.step_inputs import step_inputs

    torch.set_num_threads(1)
    source = open_source(EngineConfig.create(model=model, load_format=load_format, device="cpu"), progress=False)
    weights = dummy_weights(source.config) if load_format == "dummy" else source.weights()
    decoder = build_decoder(source.config, weights, CpuOps(num_threads=1), max_model_len=_BLOCK)
    groups = len(decoder.spec.cache_groups())
    caches = decoder.allocate_caches([rows] * groups, _BLOCK)
    table = RequestTable(rows, _BLOCK, _BLOCK, groups)
    for group in table.tables:
        group[:, 0] = range(rows)
    ids, ctx = step_inputs(table, [PlanEntry(row, 0, 1, True) for row in range(rows)])
    fastest, head = [float("inf")] * len(decoder.layers), float("inf")
    with torch.inference_mode():
        for _ in range(_REPEATS):
            stream = decoder.forward_some(ids, ctx, caches, [])
            for index, (layer, cache) in enumerate(zip(decoder.layers, caches, strict=True)):
                began = time.perf_counter()
                layer(stream, ctx, cache)
                fastest[index] = min(fastest[index], time.perf_counter() - began)
            began = time.perf_counter()
            decoder.logits(stream)
            head = min(head, time.perf_counter() - began)
    layers_cost, head_cost = layer_costs(decoder.spec)
    return {"bench": "parallel", "case": "layer times", "model": model, "rows": rows, "threads": 1,
            "layers_ms": round(1e3 * sum(fastest), 2), "head_ms": round(1e3 * head, 2),
            "head_share": round(head / (sum(fastest) + head), 3),
            "head_share_of_weights": round(head_cost / (sum(layers_cost) + head_cost), 3)}
