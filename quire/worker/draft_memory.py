"""What whoever makes drafts takes on each rank, from configs alone: no weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.models.heads.build import read_head
from quire.models.heads.ends import tables_to_read
from quire.models.heads.mtp import read_mtp
from quire.models.heads.spec import HeadSpec
from quire.models.loader.source import ModelSource, resolve_model
from quire.models.registry import read_spec
from quire.models.shard import Shard, vocabulary_runs
from quire.models.spec import DecoderSpec
from quire.speculation.options import MTP, SpeculationOptions, refuse_with_heads
from quire.worker.draft_models import check_same_vocabulary, reading_draft_model
from quire.worker.memory import NO_DRAFT, DraftKV


def draft_kv(config: EngineConfig, target: DecoderSpec) -> DraftKV:
    """What a draft model or a head keeps of each token; refuses what they do not run with."""
    speculation = config.speculation.options
    if speculation is None or not speculation.own_kv:
        return NO_DRAFT
    if speculation.reads_states:
        _check_head(speculation.method, config)
        return DraftKV(head_spec(speculation, config, target).kv_bytes_per_token, is_head=True)
    draft = _draft_model_spec(speculation, config)
    check_same_vocabulary(target, draft)
    return DraftKV(draft.kv_bytes_per_token)


def draft_parameters(config: EngineConfig, shard: Shard) -> int:
    """Weights that a rank on a CPU has on top of its share of the target: those of a draft model, or of a head and the
    target's tables of tokens, whole, where its share has not all of their rows."""
    speculation = config.speculation.options
    if speculation is None or not speculation.own_kv:
        return 0
    if not speculation.reads_states:
        return _draft_model_spec(speculation, config).num_parameters if shard.place.tensor_rank == 0 else 0
    if not shard.place.is_sampler:
        return 0
    shapes = shard.spec.parameters()
    own = head_spec(speculation, config, shard.spec).parameters().values()
    return sum(map(math.prod, (*own, *(shapes[name] for name in tables_to_read(shard)))))


@dataclass(frozen=True, slots=True)
class GpuDraft:
    """What a rank on a GPU has for drafts: parameters, and values that it keeps of each token."""

    parameters: int = 0
    kv_elements: int = 0


def gpu_draft(config: EngineConfig, shard: Shard) -> GpuDraft:
    """Every tensor rank has the draft model whole; or, on the last stage, the head's layer, and its rows of the tokens
    that a head guesses where these are not all."""
    speculation, place = config.speculation.options, shard.place
    if speculation is None or not speculation.own_kv or (speculation.reads_states and not place.is_last):
        return GpuDraft()
    if not speculation.reads_states:
        with reading_draft_model(speculation.model):
            draft = read_spec(draft_source(speculation, config).config)
        return GpuDraft(draft.num_parameters, draft.kv_bytes_per_block(1, element_size=1))
    head = head_spec(speculation, config, shard.spec)
    first, last = vocabulary_runs(head.draft_vocab, place.tensor_size)[place.tensor_rank]
    own = sum(map(math.prod, head.parameters().values()))
    return GpuDraft(own + (last - first) * head.hidden_size, head.kv_bytes_per_block(1, element_size=1))


def head_spec(speculation: SpeculationOptions, config: EngineConfig, target: DecoderSpec) -> HeadSpec:
    if speculation.method == MTP:
        return read_mtp(target)
    with reading_draft_model(speculation.model):
        return read_head(draft_source(speculation, config).config, target)


def draft_source(speculation: SpeculationOptions, config: EngineConfig) -> ModelSource:
    return resolve_model(speculation.model or "", load_format=speculation.load_format, cache_dir=config.model.cache_dir)


def _draft_model_spec(speculation: SpeculationOptions, config: EngineConfig) -> DecoderSpec:
    with reading_draft_model(speculation.model):
        return read_spec(draft_source(speculation, config).config).with_kv_dtype(config.cache.kv_cache_dtype)


def _check_head(method: str, config: EngineConfig) -> None:
    """Hidden states do not travel with KV that leaves the engine."""
    refuse_with_heads(method, {
        "kv_role": config.transfer.kv_role is not None,
        "kv_disk": config.cache.kv_disk is not None,
        "kv_pool": config.cache.kv_pool is not None,
        "kv_cache_dtype": config.cache.kv_cache_dtype == "int8",
    })
