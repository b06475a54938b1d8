"""Draws when a pool wins: bandwidth against speed of prefill; above a model's line fetching is faster."""

from __future__ import annotations

from math import log10

from quire.bench.figures.drawing import Drawing
from quire.kvpool.benefit import break_even

_WIDTH, _HEIGHT, _LEFT, _TOP = 560.0, 300.0, 80.0, 60.0
_RATES = (100.0, 1_000.0, 10_000.0, 100_000.0)
_GBITS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
_COLORS = ("#4f81bd", "#e0923d", "#6b9a4b", "#a05195")
_GREY = "#888888"


def benefit_plot(models: dict[str, int], networks: list[float]) -> Drawing:
    """`models`: name and bytes of KV a token; `networks` in Gbit/s."""
    picture = Drawing(860, 430)
    picture.text(20, 26, "Above its line a model's KV is fetched faster than it is computed", 15, bold=True)
    for rate in _RATES:
        picture.line(_x(rate), _TOP, _x(rate), _TOP + _HEIGHT, "#eeeeee")
        picture.text(_x(rate), _TOP + _HEIGHT + 18, f"{rate:,.0f}", 11, anchor="middle")
    for gbits in _GBITS:
        picture.text(_LEFT - 8, _y(gbits) + 4, f"{gbits:g}", 11, anchor="end")
        picture.line(_LEFT, _y(gbits), _LEFT + _WIDTH, _y(gbits), "#eeeeee")
    for gbits in networks:
        picture.line(_LEFT, _y(gbits), _LEFT + _WIDTH, _y(gbits), _GREY, 1.5)
        picture.text(_LEFT + 6, _y(gbits) - 5, f"{gbits:g} Gbit/s", 10, _GREY)
    for (name, size), color in zip(models.items(), _COLORS, strict=False):
        first, last = _RATES[0], _RATES[-1]
        picture.line(_x(first), _y(break_even(size, first)), _x(last), _y(break_even(size, last)), color, 2.5)
        picture.text(_x(last) + 8, _y(break_even(size, last)) + 4, f"{name} ({size // 1024} KiB a token)", 11, color)
    picture.text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 42, "prompt tokens computed in a second", 12, anchor="middle")
    picture.text(20, _TOP - 12, "Gbit/s", 12)
    return picture


def _x(rate: float) -> float:
    return _LEFT + _WIDTH * (log10(rate) - 2.0) / 3.0


def _y(gbits: float) -> float:
    return _TOP + _HEIGHT * (1.0 - (log10(gbits) + 2.0) / 5.0)
