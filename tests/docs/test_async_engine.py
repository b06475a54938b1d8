"""The example of docs/async-engine.md runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pages_example_prints_an_answer(smollm2: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "async-engine.md").read_text("utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris.")
