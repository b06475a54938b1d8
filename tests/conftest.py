"""What all tests share: the real default model, fetched once, and no property test that fails for being slow."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine may have none
    from hypothesis import HealthCheck, settings

    settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("quire")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The alias of the default model, made sure to be on this machine."""
    from quire.models.loader.source import resolve_model

    resolve_model("smollm2-135m", progress=False)
    return "smollm2-135m"
