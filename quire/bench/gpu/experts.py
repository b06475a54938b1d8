"""How many experts of each layer a step reads, counted on the device, beside what an even spread of tokens would give.

Each layer counts the rows that go through each of its experts (`Decoder.expert_load`), inside graphs too. A run with
one step in flight looks at these counts after every step: an expert whose count has grown was read by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.bench.gpu.cases import distinct_experts

if TYPE_CHECKING:
    from quire.engine.core import EngineCore
    from quire.layers.experts import ExpertLoad
    from quire.scheduler.request import Request

TOKENS = 24
"""Of each request: enough steps for a mean."""
_SHOWN = 3


@dataclass(slots=True)
class Spread:
    """Steps of so many rows: experts of a layer that they read together, on the average of steps and layers."""

    rows: int
    steps: int = 0
    distinct: float = 0.0
    expected: float = 0.0


def spread(core: EngineCore, load: ExpertLoad, requests: Sequence[Request], top_k: int) -> list[Spread]:
    """`core` has one step in flight at most. By the number of rows."""
    for request in requests:
        core.add(request)
    found: dict[int, Spread] = {}
    before = load.counts.cpu().clone()
    while core.has_work:
        core.step()
        now = load.counts.cpu().clone()
        grown, before = now - before, now
        rows = int(grown[0].sum()) // top_k
        if rows:
            each = found.setdefault(rows, Spread(rows, expected=distinct_experts(grown.shape[1], top_k, rows)))
            each.distinct = (each.distinct * each.steps + float((grown > 0).sum(1).double().mean())) / (each.steps + 1)
            each.steps += 1
    return sorted(found.values(), key=lambda each: each.rows)


def line_of(case: str, model: str, spreads: Sequence[Spread]) -> dict[str, Any]:
    """The commonest steps, and all of them together."""
    steps = sum(each.steps for each in spreads)
    distinct = sum(each.distinct * each.steps for each in spreads) / max(1, steps)
    expected = sum(each.expected * each.steps for each in spreads) / max(1, steps)
    common = sorted(spreads, key=lambda each: -each.steps)[:_SHOWN]
    return {
        "bench": "gpu", "case": case, "model": model, "experts": "distinct per layer and step",
        "steps": steps, "distinct": round(distinct, 2), "evenly": round(expected, 2),
        "share": round(distinct / expected, 4) if expected else None,
        "by_rows": [{"rows": each.rows, "steps": each.steps, "distinct": round(each.distinct, 2),
                     "evenly": round(each.expected, 2)} for each in common],
    }  # fmt: skip


def text(line: dict[str, Any]) -> str:
    parts = [f"{each['distinct']:g} of {each['evenly']:g} at {each['rows']} rows ({each['steps']} steps)"
             for each in line["by_rows"]]  # fmt: skip
    return (f"    experts of a layer that a step reads: {line['distinct']:g} measured, {line['evenly']:g} if tokens "
            f"spread evenly ({line['share']:.1%}); {', '.join(parts)}")  # fmt: skip
