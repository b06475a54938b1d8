"""A picture of hit rates over cache sizes, one curve per policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from quire.bench.figures.drawing import Drawing
from quire.sim.prefix_cache import ReplayResult

_COLORS = ("#d95f02", "#1b6ca8", "#7a7a7a", "#1b9e77", "#7570b3", "#e7298a")
_LEFT, _TOP, _RIGHT, _BOTTOM = 60.0, 50.0, 600.0, 360.0


def draw_hit_rates(results: Sequence[ReplayResult], title: str) -> Drawing:
    """Capacity on a logarithmic axis from left to right, hit rate upwards, names beside the curves' ends."""
    drawing = Drawing(740, 410)
    drawing.text(_LEFT, 28, title, size=15, bold=True)
    capacities = sorted({result.capacity for result in results})
    top = _round_up(max(result.hit_rate for result in results))
    _draw_axes(drawing, capacities, top)
    labels: list[float] = []
    for color, policy in zip(_COLORS, dict.fromkeys(result.policy for result in results), strict=False):
        curve = sorted((r.capacity, r.hit_rate) for r in results if r.policy == policy)
        points = [(_across(capacity, capacities), _up(rate, top)) for capacity, rate in curve]
        for (x1, y1), (x2, y2) in pairwise(points):
            drawing.line(x1, y1, x2, y2, color, 2.0)
        for x, y in points:
            drawing.rect(x - 2.5, y - 2.5, 5, 5, color)
        y = points[-1][1] + 4
        while any(abs(y - other) < 15 for other in labels):
            y += 3
        labels.append(y)
        drawing.text(_RIGHT + 12, y, policy, color=color)
    return drawing


def _draw_axes(drawing: Drawing, capacities: Sequence[int], top: float) -> None:
    for step in range(6):
        rate = top * step / 5
        drawing.line(_LEFT, _up(rate, top), _RIGHT, _up(rate, top), "#e4e4e4")
        drawing.text(_LEFT - 8, _up(rate, top) + 4, f"{rate:.2f}", size=11, anchor="end")
    free_from = -math.inf
    for capacity in capacities:
        x = _across(capacity, capacities)
        drawing.line(x, _BOTTOM, x, _BOTTOM + 4, "#888888")
        if x >= free_from:
            drawing.text(x, _BOTTOM + 18, f"{capacity:,}", size=11, anchor="middle")
            free_from = x + 44
    drawing.text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, "cache size in blocks", anchor="middle")


def _across(capacity: int, capacities: Sequence[int]) -> float:
    low, high = math.log(capacities[0]), math.log(capacities[-1])
    share = (math.log(capacity) - low) / (high - low) if high > low else 0.5
    return _LEFT + 10 + share * (_RIGHT - _LEFT - 20)


def _up(rate: float, top: float) -> float:
    return _BOTTOM - rate / top * (_BOTTOM - _TOP)


def _round_up(rate: float) -> float:
    """The next twentieth, so that five grid lines have short labels."""
    return max(0.05, math.ceil(rate * 20) / 20)
