"""Draws what became of each request under each policy: waiting, prompt, and a mark for every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.bench.figures.drawing import Drawing
from quire.bench.scheduling.arrivals import Story

_LEFT, _RIGHT, _TOP, _PANEL_GAP, _ROW = 60, 30, 64, 46, 11
_WAITING, _PROMPT, _STREAM = "#d9d9d9", "#f0a04b", "#cfe3f5"
_TOKEN, _LATE, _GRID = "#1f5f99", "#c0392b", "#e6e6e6"
_PLOT_WIDTH = 860


def draw_timeline(panels: Mapping[str, Sequence[Story]], bound: float | None, title: str) -> Drawing:
    """One panel for each policy, all on one time axis; gaps longer than `bound` seconds are marked."""
    seconds = max(story.tokens[-1] for stories in panels.values() for story in stories)
    rows = max(len(stories) for stories in panels.values())
    panel = rows * _ROW
    height = _TOP + len(panels) * (panel + _PANEL_GAP) + 10
    drawing = Drawing(_LEFT + _PLOT_WIDTH + _RIGHT, height)
    drawing.text(_LEFT, 24, title, size=15, bold=True)
    _legend(drawing, bound)
    for index, (name, stories) in enumerate(panels.items()):
        top = _TOP + index * (panel + _PANEL_GAP) + 14
        drawing.text(_LEFT, top - 4, name, size=12, bold=True)
        _grid(drawing, top, panel, seconds)
        for row, story in enumerate(stories):
            _request(drawing, top + row * _ROW, story, seconds, bound)
    return drawing


def _legend(drawing: Drawing, bound: float | None) -> None:
    x = float(_LEFT)
    entries = [("waiting", _WAITING), ("prompt", _PROMPT), ("streaming", _STREAM), ("token", _TOKEN)]
    if bound is not None:
        entries.append((f"gap over {bound * 1e3:.0f} ms", _LATE))
    for words, color in entries:
        drawing.rect(x, 34, 12, 10, color)
        drawing.text(x + 16, 43, words, size=11)
        x += 32 + 7 * len(words)


def _grid(drawing: Drawing, top: float, height: float, seconds: float) -> None:
    step = _tick(seconds)
    for i in range(int(seconds / step) + 1):
        x = _x(i * step, seconds)
        drawing.line(x, top, x, top + height, _GRID)
        drawing.text(x, top + height + 13, f"{i * step:g} s", size=10, color="#666666", anchor="middle")


def _request(drawing: Drawing, top: float, story: Story, seconds: float, bound: float | None) -> None:
    inner = _ROW - 3
    spans = [(story.arrived, story.scheduled, _WAITING), (story.scheduled, story.tokens[0], _PROMPT),
             (story.tokens[0], story.tokens[-1], _STREAM)]
    for begin, end, color in spans:
        drawing.rect(_x(begin, seconds), top, max(0.0, _x(end, seconds) - _x(begin, seconds)), inner, color)
    for at, gap in zip(story.tokens, story.gaps, strict=False):
        if bound is not None and gap > bound:
            drawing.rect(_x(at, seconds), top + 2, _x(at + gap, seconds) - _x(at, seconds), inner - 4, _LATE)
    for at in story.tokens:
        drawing.line(_x(at, seconds), top, _x(at, seconds), top + inner, _TOKEN, 0.6)


def _x(at: float, seconds: float) -> float:
    return _LEFT + _PLOT_WIDTH * at / seconds


def _tick(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are about ten of them."""
    size = 1e-3
    while True:
        for factor in (1, 2, 5):
            if seconds / (size * factor) <= 12:
                return size * factor
        size *= 10
