"""Reads the small JSON files beside a model, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError

# The largest of them is the index of a sharded model, a few MB.
MAX_JSON_BYTES = 64 << 20


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`; ModelLoadError when it is missing, too large, not JSON or not an object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} should hold a JSON object, it holds a {type(value).__name__}")
    return value
