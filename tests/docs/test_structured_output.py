"""The examples of docs/structured-output.md run as they stand, and its lists are those of the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from quire.structured.json_schema import FORMATS, MAX_DEPTH

PAGE = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")


def test_the_examples_run(smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xgrammar")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    runpy.run_path(str(script))["llm"].close()
    lines = capsys.readouterr().out.splitlines()
    assert any(re.fullmatch(r"\d{4}-\d{2}-\d{2} stop", line) for line in lines)
    assert any(line in ("positive stop", "negative stop") for line in lines)


def test_the_page_names_every_format_and_limit() -> None:
    assert all(re.search(rf"\b{name}\b", PAGE) for name in FORMATS)
    assert f"{MAX_DEPTH} levels" in PAGE
