"""The model that an engine's options name, found but not loaded, and the head that comes with the package for it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.speculation.options import EAGLE

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource


def open_source(config: EngineConfig, progress: bool = True) -> ModelSource:
    from quire.models.loader.source import resolve_model

    model = config.model
    return resolve_model(model.model, tokenizer=model.tokenizer, load_format=model.load_format,
                         cache_dir=model.cache_dir, progress=progress)


def with_shipped_head(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """The same, with the head named where speculation by 'eagle' names none. Refuses a model that there is none for."""
    options = config.speculation.options
    if options is None or options.method != EAGLE or options.model is not None:
        return config
    from quire.models.heads.shipped import shipped_head
    from quire.models.registry import read_spec

    given = {"method": EAGLE, **(config.speculation.speculative_config or {}),
             "model": str(shipped_head(read_spec(source.config)))}
    return dataclasses.replace(config, speculation=dataclasses.replace(
        config.speculation, speculative=None, speculative_config=given))
