"""Tiny models for the tests of the pool, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a tiny model of a family, of 2,048 positions."""
    made: dict[str, Path] = {}

    def make(family: str, seed: int = 0) -> Path:
        name = f"{family}-{seed}"
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_checkpoint(made[name], family, seed=seed, eos_token_id=2, max_position_embeddings=2048)
        return made[name]

    return make
