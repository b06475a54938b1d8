"""Who proposes and judges drafts on a GPU, as its worker takes it: the options, and the draft model if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.config import EngineConfig
from quire.kernels.quantized import StoredWeight
from quire.models.decoder import Decoder
from quire.models.heads.build import build_head
from quire.models.heads.head import DraftHead
from quire.models.heads.mtp import build_mtp
from quire.models.heads.spec import HeadSpec
from quire.models.loader.source import ModelSource
from quire.models.registry import read_spec
from quire.speculation.options import MTP, REJECTION, SpeculationOptions, refuse_with_heads
from quire.worker.draft_memory import draft_source, head_spec
from quire.worker.draft_models import reading_draft_model
from quire.worker.gpu.weights import moved

BuildHead = Callable[[Decoder, torch.device, int], DraftHead]
"""Of a target that lies on a device, for sequences of at most so many tokens."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafts are made and judged on the device; `config` and `weights` are a draft model's (None: random ones)."""

    options: SpeculationOptions
    config: Mapping[str, Any] | None = None
    weights: Iterable[tuple[str, StoredWeight]] | None = None
    head: BuildHead | None = None
    """Of a head that reads the target's hidden states."""
    head_spec: HeadSpec | None = None
    """The same as plain data: for stages of a pipeline that have no head."""

    @property
    def rejection(self) -> bool:
        return self.options.verifier == REJECTION


def speculation_of(config: EngineConfig, source: ModelSource) -> Speculation | None:
    """`source`: of the target."""
    options = config.speculation.options
    if options is not None and options.reads_states:
        _check_head(options.method, config)
        spec = head_spec(options, config, read_spec(source.config))
        build = partial(_mtp, source) if options.method == MTP else partial(_eagle, draft_source(options, config))
        return Speculation(options, head=build, head_spec=spec)
    if options is None or options.model is None:
        return None if options is None else Speculation(options)
    with reading_draft_model(options.model):
        draft = draft_source(options, config)
    return Speculation(options, draft.config, _draft_weights(draft, config))


def _draft_weights(draft: ModelSource, config: EngineConfig) -> Iterable[tuple[str, StoredWeight]] | None:
    """As the target's: in the file's own bits, unless floats are asked for."""
    if draft.is_dummy:
        return None
    return draft.weights(None) if config.model.asks_for_floats else draft.stored_weights()


def _check_head(method: str, config: EngineConfig) -> None:
    """Hidden states do not travel with KV that leaves the engine, and are kept in the activations' type."""
    refuse_with_heads(method, {
        "kv_role": config.transfer.kv_role is not None,
        "kv_disk": config.cache.kv_disk is not None,
        "kv_pool": config.cache.kv_pool is not None,
        "kv_cache_dtype": config.cache.kv_cache_dtype == "fp8",
    })


def _eagle(source: ModelSource, target: Decoder, device: torch.device, max_model_len: int) -> DraftHead:
    return build_head(source.config, moved(source.weights(None), device), target, max_model_len)


def _mtp(source: ModelSource, target: Decoder, device: torch.device, max_model_len: int) -> DraftHead:
    return build_mtp(source, target, max_model_len, lambda weights: moved(weights, device))
