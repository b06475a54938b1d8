"""The model that an engine's options name, found but not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config import EngineConfig

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource


def open_source(config: EngineConfig, progress: bool = True) -> ModelSource:
    from quire.models.loader.source import resolve_model

    model = config.model
    return resolve_model(model.model, tokenizer=model.tokenizer, load_format=model.load_format,
                         cache_dir=model.cache_dir, progress=progress)
