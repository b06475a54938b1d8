"""One tiny model of each kind of vocabulary, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from tests.structured.tiny import make_model, tiny_llm

pytest.importorskip("xgrammar")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", params=["byte_level", "gemma", "llama2"])
def any_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(make_model(tmp_path_factory.mktemp(request.param), request.param)) as llm:
        yield llm


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with tiny_llm(tiny_folder) as made:
        yield made
