"""What all tests share: the real default model, fetched once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The alias of the default model, made sure to be on this machine."""
    from quire.models.loader.source import resolve_model

    resolve_model("smollm2-135m", progress=False)
    return "smollm2-135m"
