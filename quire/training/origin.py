"""What the texts in a folder were made of, so that those of other questions are not trained on as if asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ConfigError

_CONTENT = "data-sha256"
"""Of the file of questions: it may have changed under its name."""


def origin_of(model: str, data: str | None, own: int | None, seed: int, max_length: int, max_answer: int
              ) -> dict[str, object]:
    content = None if data is None else hashlib.sha256(Path(data).expanduser().read_bytes()).hexdigest()
    return {"model": model, "data": data, _CONTENT: content, "self": own, "seed": seed, "max-length": max_length,
            "max-answer": max_answer}


def check_origin(found: Mapping[str, object], wanted: Mapping[str, object], folder: Path) -> None:
    for name, value in wanted.items():
        if found and found.get(name) != value:
            raise ConfigError(f"{folder} holds texts that were made {_other(name, found)}: give the same, or another "
                              "--out, or delete what is named texts* and training* in it to begin again",
                              field="data" if name == _CONTENT else name)


def _other(name: str, found: Mapping[str, object]) -> str:
    if name == _CONTENT:
        return f"when {found.get('data')} had other contents"
    return f"without --{name}" if found.get(name) is None else f"with --{name} {found[name]}"
