"""Makes sure that `tests` is this folder's parent, whatever package of that name is installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from quire.engine.assembly import device

_OURS = str(Path(__file__).resolve().parents[1])
_known = sys.modules.get("tests")
if _known is None or _OURS not in list(getattr(_known, "__path__", [])):
    _known = types.ModuleType("tests") if _known is None else _known
    _known.__path__ = [_OURS, *getattr(_known, "__path__", [])]
    sys.modules["tests"] = _known


@pytest.fixture(autouse=True)
def no_engine_compiles_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small engines, each with another model, find their kernels in Triton's cache: processes that ask for
    them first would take the cores of the other tests."""
    monkeypatch.setattr(device, "_compile_ahead", lambda *_: None)
