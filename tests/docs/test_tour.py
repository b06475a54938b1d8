"""The tour names files that exist, and an afternoon's worth of lines."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP = re.compile(r"^\|[^|]*\| \[(quire/[^]]+)\]\([^)]+\) \| (\d+) \|", re.MULTILINE)


def test_the_tour_says_how_long_its_files_are() -> None:
    stops = STOP.findall((ROOT / "docs/tour.md").read_text())
    assert len(stops) > 10
    total = 0
    for name, said in stops:
        lines = len((ROOT / name).read_text().splitlines())
        assert abs(lines - int(said)) <= 10 + lines // 5, f"docs/tour.md: {name} has {lines} lines by now"
        total += lines
    assert total < 3000, "an afternoon is not enough any more: choose other files"
