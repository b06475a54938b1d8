"""Pictures are valid files of the kind that their name says, or of the kind that can be written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.bench.arrivals import Story
from quire.bench.drawing import Drawing
from quire.bench.timeline import draw_timeline


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


def test_a_png_becomes_an_svg_where_matplotlib_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = drawing().save(tmp_path / "picture.png")
    assert path == tmp_path / "picture.svg" and path.exists()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (extra: plot)")
def test_a_png_is_one_of_the_drawing_s_size(tmp_path: Path) -> None:
    data = drawing().save(tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG") and data[16:24] == (100).to_bytes(4, "big") + (50).to_bytes(4, "big")


def test_a_timeline_marks_gaps_over_the_bound_and_only_those() -> None:
    stories = [Story(0.0, 0.5, [1.0, 1.1, 1.6, 1.7])]
    colors = [shape.color for shape in draw_timeline({"p": stories}, 0.3, "t").shapes]
    free = [shape.color for shape in draw_timeline({"p": stories}, None, "t").shapes]
    assert colors.count("#c0392b") == 2, "one in the legend, one gap"
    assert free.count("#c0392b") == 0
