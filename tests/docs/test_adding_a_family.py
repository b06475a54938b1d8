"""docs/adding-a-family.md shows a family's file as it stands, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-family.md"


def test_the_page_shows_the_file_of_a_family_of_experts_as_it_stands() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code == (ROOT / "quire/models/families/mixtral.py").read_text(encoding="utf-8")


def test_the_page_fits_on_one_page() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 75


def test_the_page_names_files_that_exist() -> None:
    named = set(re.findall(r"`((?:quire|tests)/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 6
    assert not {name for name in named if not (ROOT / name).is_file()}
