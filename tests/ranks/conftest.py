"""A tiny model for ranks to share: six heads, two of keys, three layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint(folder, "llama")
    return folder
