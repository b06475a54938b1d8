"""Puts an engine together from its configuration: source, worker, executor, cache, scheduler, core."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.executor.local import LocalExecutor
from quire.kvcache.manager import CacheGroup, KVCacheManager
from quire.models.spec import DecoderSpec
from quire.scheduler.pacing import StepPacer
from quire.scheduler.policy import BATCHING_POLICIES
from quire.scheduler.queue import QUEUES
from quire.scheduler.scheduler import Limits, Scheduler
from quire.worker.memory import PoolSize

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource

_DEFAULT_BATCHED_TOKENS = 2048


@dataclass(slots=True)
class Engine:
    """A core ready to step, with what its front doors need to know about the model."""

    config: EngineConfig
    source: ModelSource
    spec: DecoderSpec
    pool: PoolSize
    core: EngineCore


def open_source(config: EngineConfig, progress: bool = True) -> ModelSource:
    from quire.models.loader.source import resolve_model

    model = config.model
    return resolve_model(model.model, tokenizer=model.tokenizer, load_format=model.load_format,
                         cache_dir=model.cache_dir, progress=progress)


def build_engine(config: EngineConfig, progress: bool = True) -> Engine:
    """Load the model and connect the rooms. This is where torch is imported."""
    source = open_source(config, progress)
    from quire.worker.worker import Worker

    worker = Worker(source, config)
    depth = config.scheduler.max_steps_in_flight
    cache = KVCacheManager(
        worker.pool.num_blocks,
        config.cache.block_size,
        groups=tuple(CacheGroup(group.window) for group in worker.spec.cache_groups()),
        prefix_caching=config.cache.enable_prefix_caching,
        eviction_policy=config.cache.eviction_policy,
    )
    scheduler = Scheduler(
        limits_of(config, worker.pool.max_model_len),
        cache,
        queue=QUEUES[config.scheduler.scheduling_policy](),
        policy=BATCHING_POLICIES[config.scheduler.batching_policy](),
        clock=time.time,
        pacer=None if config.scheduler.itl_slo_ms is None else StepPacer(config.scheduler.itl_slo_ms / 1e3),
    )
    core = EngineCore(scheduler, LocalExecutor(worker, overlap=depth > 1), depth)
    return Engine(config, source, worker.spec, worker.pool, core)


def limits_of(config: EngineConfig, max_model_len: int) -> Limits:
    """The scheduler's limits; without chunking a step holds a whole prompt unless the user said otherwise."""
    options = config.scheduler
    budget = options.max_num_batched_tokens
    if budget is None:
        budget = max(_DEFAULT_BATCHED_TOKENS, 0 if options.enable_chunked_prefill else max_model_len)
    return Limits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        chunked_prefill=options.enable_chunked_prefill,
        max_num_partial_prefills=options.max_num_partial_prefills,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
    )
