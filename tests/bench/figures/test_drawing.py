"""Pictures are valid files of the kind that their name says, or of the kind that can be written."""

from __future__ import annotations

import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from quire.bench.figures.drawing import Drawing, check_drawable
from quire.bench.scheduling.arrivals import Story
from quire.bench.scheduling.timeline import draw_timeline
from quire.errors import QuireError


def drawing() -> Drawing:
    found = Drawing(100, 50)
    found.rect(1, 2, 3, 4, "#ff0000")
    found.line(0, 0, 10, 10, "#00ff00")
    found.line(0, 5, 10, 5, "#00ff00")
    found.line(0, 6, 10, 6, "#0000ff")
    found.text(5, 5, "a < b & c", bold=True, anchor="end")
    return found


def test_an_svg_holds_every_shape_and_escapes_words(tmp_path: Path) -> None:
    path = drawing().save(tmp_path / "picture.svg")
    root = ElementTree.parse(path).getroot()
    tags = [element.tag.rpartition("}")[2] for element in root]
    assert tags == ["rect", "rect", "path", "path", "text"] and root[-1].text == "a < b & c"
    assert [element.get("d", "").count("M") for element in root if element.tag.endswith("path")] == [2, 1]


def test_a_png_is_a_whole_one_of_the_drawing_s_size_and_colors(tmp_path: Path) -> None:
    picture = Drawing(100, 50)
    picture.rect(10, 20, 30, 10, "#ff0000")
    picture.line(60, 5, 60, 45, "#00ff00", 4)
    data = picture.save(tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[16:24] == (100).to_bytes(4, "big") + (50).to_bytes(4, "big")
    pixels, at = b"", 8
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == int.from_bytes(data[at + 8 + size : at + 12 + size], "big")
        pixels += body if kind == b"IDAT" else b""
        at += 12 + size
    rows = zlib.decompress(pixels)
    assert len(rows) == 50 * 301

    def pixel(x: int, y: int) -> bytes:
        return rows[301 * y + 1 + 3 * x :][:3]

    assert pixel(11, 21) == pixel(39, 29) == b"\xff\0\0" and pixel(60, 25) == b"\0\xff\0"
    assert pixel(9, 21) == pixel(40, 21) == pixel(70, 25) == b"\xff\xff\xff"


def test_words_in_a_png_are_where_the_svg_has_them() -> None:
    for anchor, inside in (("start", (48, 95)), ("middle", (28, 72)), ("end", (5, 52))):
        picture = Drawing(100, 30)
        picture.text(50, 20, "Ag 7", 16, anchor=anchor)
        sheet = decode(picture.png())
        rows, columns = (sheet.min(2) < 200).nonzero()
        assert inside[0] <= columns.min() and columns.max() <= inside[1] and rows.min() >= 5 and rows.max() <= 25


def test_every_letter_that_can_be_typed_looks_unlike_the_others_but_two() -> None:
    shapes = {}
    for code in range(33, 127):
        picture = Drawing(20, 30)
        picture.text(4, 20, chr(code), 16)
        shapes.setdefault(picture.png(), []).append(chr(code))
    assert [same for same in shapes.values() if len(same) > 1] == [["I", "l"]]


def decode(data: bytes) -> np.ndarray:
    """Pixels of one of our own files: its one IDAT, no filters."""
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    body = zlib.decompress(data[data.index(b"IDAT") + 4 :])
    return np.frombuffer(body, np.uint8).reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)


def test_a_timeline_marks_gaps_over_the_bound_and_only_those() -> None:
    stories = [Story(0.0, 0.5, [1.0, 1.1, 1.6, 1.7])]
    colors = [shape.color for shape in draw_timeline({"p": stories}, 0.3, "t").shapes]
    free = [shape.color for shape in draw_timeline({"p": stories}, None, "t").shapes]
    assert colors.count("#c0392b") == 2, "one in the legend, one gap"
    assert free.count("#c0392b") == 0


def test_a_format_that_cannot_be_drawn_is_refused_before_and_after_measuring(tmp_path: Path) -> None:
    for name in ("a.xyz", "a", "a.jpeg"):
        with pytest.raises(QuireError, match=r"name it a\.png or a\.svg"):
            drawing().save(tmp_path / name)
        with pytest.raises(QuireError, match=r"a PNG or an SVG"):
            check_drawable(tmp_path / name)
    assert not list(tmp_path.iterdir())
    for fine in (None, "", tmp_path / "a.PNG", tmp_path / "a.svg"):
        check_drawable(fine)


def test_a_place_that_cannot_be_written_is_an_error_of_our_own(tmp_path: Path) -> None:
    for name in ("a.png", "a.svg"):
        with pytest.raises(QuireError, match="could not be written"):
            drawing().save(tmp_path / "missing" / name)
