"""Who proposes and judges drafts on a GPU, as its worker takes it: the options, and the draft model if there is one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.config import EngineConfig
from quire.models.loader.source import resolve_model
from quire.speculation.options import REJECTION, SpeculationOptions
from quire.worker.draft_models import reading_draft_model


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made and judged on the device; `config` and `weights` are a draft model's (None: random ones)."""

    options: SpeculationOptions
    config: Mapping[str, Any] | None = None
    weights: Iterable[tuple[str, Tensor]] | None = None

    @property
    def rejection(self) -> bool:
        return self.options.verifier == REJECTION


def speculation_of(config: EngineConfig) -> Speculation | None:
    options = config.speculation.options
    if options is None or options.model is None:
        return None if options is None else Speculation(options)
    with reading_draft_model(options.model):
        draft = resolve_model(options.model, load_format=options.load_format, cache_dir=config.model.cache_dir)
    return Speculation(options, draft.config, None if options.load_format == "dummy" else draft.weights(None))
