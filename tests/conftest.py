"""What all tests share: the real default model, fetched once, and no property test that fails for being slow."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis") is not None:  # a GPU machine may have none
    from hypothesis import HealthCheck, settings

    slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    # The same examples in every run, so that a change is judged by what it changed. To look for new ones:
    # pytest --hypothesis-profile=explore (a failure is printed with the decorator that repeats it).
    settings.register_profile("quire", derandomize=True, database=None, **slow_is_fine)
    settings.register_profile("explore", print_blob=True, **slow_is_fine)
    settings.load_profile("quire")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The alias of the default model, made sure to be on this machine."""
    from quire.models.loader.source import resolve_model

    resolve_model("smollm2-135m", progress=False)
    return "smollm2-135m"
