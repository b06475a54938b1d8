"""Simple pictures: rectangles, lines and words, as SVG or PNG."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from quire.bench.figures.raster import Raster
from quire.errors import QuireError

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


def _check_format(target: Path) -> None:
    if target.suffix.lower() not in (".png", ".svg"):
        raise QuireError(f"a picture is a PNG or an SVG: name it {target.stem or 'picture'}.png or "
                         f"{target.stem or 'picture'}.svg, not {target.name or target}")


def check_drawable(path: str | Path | None) -> None:
    """Refuse a place where no picture can be written before minutes of measuring, not after."""
    if not path:
        return
    target = Path(path)
    _check_format(target)
    why = "is a folder" if target.is_dir() else None
    if not target.parent.is_dir():
        why = f"there is no folder {target.parent}"
    elif not os.access(target.parent, os.W_OK):
        why = f"the folder {target.parent} cannot be written to"
    if why is not None:
        raise QuireError(f"the picture {target} could not be written: {why}")


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
        """Write the file that its name asks for."""
        target = Path(path)
        _check_format(target)
        data = self.png() if target.suffix.lower() == ".png" else self.svg().encode()
        try:
            target.write_bytes(data)
        except OSError as error:
            raise QuireError(f"the picture {target} could not be written: {error.strerror}") from None
        return target

    def svg(self) -> str:
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
                f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="{_FONT}">')
        background = f'<rect width="{self.width:g}" height="{self.height:g}" fill="#ffffff"/>'
        parts = [_svg_lines(list(shapes)) if style else "\n".join(map(_svg_shape, shapes))
                 for style, shapes in groupby(self.shapes, key=_line_style)]
        return "\n".join([head, background, *parts, "</svg>"]) + "\n"

    def png(self) -> bytes:
        sheet = Raster(self.width, self.height)
        for shape in self.shapes:
            if isinstance(shape, _Rect):
                sheet.rect(shape.x, shape.y, shape.width, shape.height, shape.color)
            elif isinstance(shape, _Line):
                sheet.line(shape.x1, shape.y1, shape.x2, shape.y2, shape.color, shape.width)
            else:
                sheet.text(shape.x, shape.y, shape.words, shape.size, shape.color, shape.anchor, shape.bold)
        return sheet.png()


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
