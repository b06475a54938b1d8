"""Simple pictures: rectangles, lines and words, as SVG, or as PNG where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class _Rect:
    x: float
    y: float
    width: float
    height: float
    color: str


@dataclass(frozen=True, slots=True)
class _Line:
    x1: float
    y1: float
    x2: float
    y2: float
    color: str
    width: float


@dataclass(frozen=True, slots=True)
class _Text:
    x: float
    y: float
    words: str
    size: float
    color: str
    anchor: str
    """start, middle or end: which part of the words is at x."""
    bold: bool


@dataclass(slots=True)
class Drawing:
    """Shapes in pixels, y downwards; later ones lie on top."""

    width: float
    height: float
    shapes: list[_Rect | _Line | _Text] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.shapes.append(_Rect(x, y, width, height, color))

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0) -> None:
        self.shapes.append(_Line(x1, y1, x2, y2, color, width))

    def text(self, x: float, y: float, words: str, size: float = 12.0, color: str = "#222222",
             anchor: str = "start", bold: bool = False) -> None:
        self.shapes.append(_Text(x, y, words, size, color, anchor, bold))

    def save(self, path: str | Path) -> Path:
        """Write the file its name asks for; a PNG becomes an SVG beside it where matplotlib is missing."""
        target = Path(path)
        if target.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is not None:
            self._save_png(target)
            return target
        target = target.with_suffix(".svg")
        target.write_text(self.svg(), encoding="utf-8")
        return target

    def svg(self) -> str:
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
                f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="{_FONT}">')
        background = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        parts = [_svg_lines(list(shapes)) if style else "\n".join(map(_svg_shape, shapes))
                 for style, shapes in groupby(self.shapes, key=_line_style)]
        return "\n".join([head, background, *parts, "</svg>"]) + "\n"

    def _save_png(self, target: Path) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        dpi = 100
        figure = Figure(figsize=(self.width / dpi, self.height / dpi), dpi=dpi, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        for layer, shape in enumerate(self.shapes):
            _plot_shape(axes, shape, layer)
        figure.savefig(target, format="png")


def _line_style(shape: _Rect | _Line | _Text) -> tuple[str, float] | None:
    return (shape.color, shape.width) if isinstance(shape, _Line) else None


def _svg_lines(lines: list[Any]) -> str:
    """Lines of one style as one path: a timeline has thousands."""
    moves = "".join(f"M{line.x1:.1f} {line.y1:.1f}L{line.x2:.1f} {line.y2:.1f}" for line in lines)
    return f'<path d="{moves}" stroke="{lines[0].color}" stroke-width="{lines[0].width:g}" fill="none"/>'


def _svg_shape(shape: _Rect | _Line | _Text) -> str:
    if isinstance(shape, _Rect):
        return (f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" '
                f'height="{shape.height:.2f}" fill="{shape.color}"/>')
    if isinstance(shape, _Line):
        return _svg_lines([shape])
    weight = ' font-weight="bold"' if shape.bold else ""
    return (f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" fill="{shape.color}" '
            f'text-anchor="{shape.anchor}"{weight}>{escape(shape.words)}</text>')


def _plot_shape(axes: Any, shape: _Rect | _Line | _Text, layer: int) -> None:
    if isinstance(shape, _Rect):
        from matplotlib.patches import Rectangle

        size = (shape.width, shape.height)
        axes.add_patch(Rectangle((shape.x, shape.y), *size, facecolor=shape.color, linewidth=0, zorder=layer))
    elif isinstance(shape, _Line):
        ends = ([shape.x1, shape.x2], [shape.y1, shape.y2])
        axes.plot(*ends, color=shape.color, linewidth=0.72 * shape.width, zorder=layer)
    else:
        side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
        axes.text(shape.x, shape.y, shape.words, fontsize=0.72 * shape.size, color=shape.color, ha=side,
                  va="baseline", fontweight="bold" if shape.bold else "normal", zorder=layer)
