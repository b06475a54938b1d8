"""Draws a few steps of a real run as SVG: when the host launched each one, and when the GPU worked on it."""

from __future__ import annotations

from dataclasses import dataclass

_WIDTH, _LEFT, _LANE = 960, 90, 34
_COLOURS = ("#4878a8", "#e49444", "#6a9f58", "#a87c9f")


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One step in milliseconds since the clock began."""

    host_begin: float
    host_end: float
    gpu_begin: float
    gpu_end: float


def middle(spans: list[StepSpan], count: int = 10) -> list[StepSpan]:
    """Steps from the middle of a run, where nothing starts or ends."""
    first = max(0, (len(spans) - count) // 2)
    return spans[first : first + count]


def draw(spans: list[StepSpan], title: str) -> str:
    """Two lanes, the same colour for the same step; the time between launches is planning and taking in."""
    begin = min(span.host_begin for span in spans)
    scale = (_WIDTH - _LEFT - 10) / max(max(span.gpu_end for span in spans) - begin, 1e-6)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="150" font-family="sans-serif" '
             'font-size="12">', '<rect width="100%" height="100%" fill="white"/>',
             f'<text x="10" y="20">{title}</text>',
             '<text x="10" y="62">host launch</text>', f'<text x="10" y="{62 + _LANE}">GPU</text>']
    for index, span in enumerate(spans):
        colour = _COLOURS[index % len(_COLOURS)]
        for lane, first, last in ((0, span.host_begin, span.host_end), (1, span.gpu_begin, span.gpu_end)):
            x, width = _LEFT + (first - begin) * scale, max(1.0, (last - first) * scale - 0.5)
            parts.append(f'<rect x="{x:.1f}" y="{44 + lane * _LANE}" width="{width:.1f}" height="26" fill="{colour}"/>')
    total = max(span.gpu_end for span in spans) - begin
    parts.append(f'<text x="{_LEFT}" y="136">0</text><text x="{_WIDTH - 70}" y="136">{total:.2f} ms</text></svg>')
    return "\n".join(parts) + "\n"
