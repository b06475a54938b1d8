"""Puts an engine together from its configuration: source, worker, executor, cache, scheduler, core."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config import CPU_DEFAULTS, EngineConfig
from quire.engine.assembly.calibration import measure_move_cost, measure_step_times
from quire.engine.assembly.device import ModelWorker, build_worker, draft_rows, keeps_codes, resolve
from quire.engine.assembly.grammar_process import start_nursery
from quire.engine.assembly.pool_tiers import build_pool_tiers, has_pool
from quire.engine.assembly.source import open_source, with_shipped_head
from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.kvcache.host_tier import HostTier
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.kvcache.move_cost import MoveCost
from quire.kvcache.secret import derived_secret
from quire.models.spec import DecoderSpec
from quire.options import parse_bytes
from quire.scheduler.pacing import StepPacer
from quire.scheduler.policy import BATCHING_POLICIES
from quire.scheduler.preemption import Preemption, PreemptionMode
from quire.scheduler.queue import QUEUES
from quire.scheduler.scheduler import Limits, Scheduler
from quire.speculation.assembly import build_speculator
from quire.speculation.device_speculator import DeviceSpeculator
from quire.structured.compiler import CompileLimits, GrammarCompiler
from quire.structured.isolated import IsolatedGrammars
from quire.structured.packets import CellLimits
from quire.structured.vocabulary import Vocabulary, read_vocabulary
from quire.worker.gpu.compile_ahead.early import begin_early
from quire.worker.memory import PoolSize, groups_with_draft

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource
    from quire.peers.hub import PeerHub

_STAGE_TOKENS = 96
"""Of a step of a pipeline on a CPU: as many as a GEMM multiplies with a piece of its weight (ROW_BLOCK of linear.c), so
that more would not make them cheaper."""


@dataclass(slots=True)
class Engine:
    """A core ready to step, with what its front doors need to know about the model."""

    config: EngineConfig
    source: ModelSource
    spec: DecoderSpec
    pool: PoolSize
    core: EngineCore
    peers: PeerHub | None = None
    """Other engines, where there are any."""


def build_engine(config: EngineConfig, progress: bool = True, clock: Callable[[], float] = time.time,
                 options: Mapping[str, Any] | None = None) -> Engine:
    """Load the model and connect the rooms. This is where torch is imported.

    With the `options` that `config` was made of, grammars of structured outputs get processes of their own.
    """
    source = open_source(config, progress)
    compilers = None if keeps_codes(source, config) else begin_early(config)
    try:
        if not config.model.skip_tokenizer_init:
            source.start_tokenizer()
        config = with_shipped_head(resolve(config, source), source)
        worker, executor = build_worker(source, config, compilers)
    finally:
        if compilers is not None:
            compilers.close()
    try:
        return _connect_rooms(config, source, worker, executor, clock, options)
    except BaseException:
        executor.close()  # it may have processes of its own
        raise


def _connect_rooms(config: EngineConfig, source: ModelSource, worker: ModelWorker, executor: Executor,
                   clock: Callable[[], float], options: Mapping[str, Any] | None) -> Engine:
    cost = measure_move_cost(executor, config, worker.spec, worker.pool)
    cache = build_cache(config, worker.spec, worker.pool, cost)
    speculator = build_speculator(config.speculation.options, draft_rows(config))
    if isinstance(speculator, DeviceSpeculator):
        if config.scheduler.max_steps_in_flight == 1:
            speculator.overlaps = False
        speculator.joined = config.parallel.pipeline_parallel_size == 1  # each stage has drafts of its own to judge
    if speculator is not None and speculator.adaptive and config.model.executor != "dummy":
        measure_step_times(speculator, executor, config, worker.spec, worker.pool)
    if has_pool(config):
        connect_pool(config, source, worker, cache)
    scheduler = Scheduler(
        limits_of(config, worker.pool.max_model_len),
        cache,
        queue=QUEUES[config.scheduler.scheduling_policy](),
        policy=BATCHING_POLICIES[config.scheduler.batching_policy](),
        clock=clock,
        pacer=None if config.scheduler.itl_slo_ms is None else StepPacer(config.scheduler.itl_slo_ms / 1e3),
        preemption=Preemption(cache, PreemptionMode(config.scheduler.preemption_mode), cost),
        speculator=speculator,
    )
    core = EngineCore(scheduler, executor, config.scheduler.max_steps_in_flight or 1,
                      build_grammars(config, source, worker.spec.vocab_size) if options is None
                      else isolate_grammars(config, options, worker.spec.vocab_size, source.eos_token_ids))
    if isinstance(core.grammars, IsolatedGrammars):
        scheduler.compiling.isolated = core.grammars
    engine = Engine(config, source, worker.spec, worker.pool, core)
    if config.transfer.kv_role is not None:
        from quire.engine.assembly.peers import connect_peers

        engine.peers = connect_peers(config, source, worker, core)
    return engine


def connect_pool(config: EngineConfig, source: ModelSource, worker: ModelWorker, cache: KVCacheManager) -> None:
    """Give the cache its tiers beyond this engine's memory."""
    tiers = build_pool_tiers(config, source, worker, len(cache.groups),
                             None if cache.cost is None else cache.cost.recompute)
    for tier in tiers:
        cache.add_tier(tier)


def build_grammars(config: EngineConfig, source: ModelSource, vocab_size: int) -> GrammarCompiler | None:
    """Who compiles grammars; tokenizer and compiler are loaded when the first one is asked for."""
    if config.model.skip_tokenizer_init:
        return None
    options = config.structured

    def vocabulary() -> Vocabulary:
        return read_vocabulary(source.tokenizer(), vocab_size, source.eos_token_ids)

    return GrammarCompiler(vocabulary, CompileLimits(
        options.grammar_timeout, parse_bytes(options.grammar_cache_memory, "grammar_cache_memory"),
        options.grammar_threads))


def isolate_grammars(config: EngineConfig, options: Mapping[str, Any], vocab_size: int,
                     eos_token_ids: Collection[int]) -> IsolatedGrammars | None:
    """The same in processes of their own, the first of which is started when the first grammar is asked for."""
    if config.model.skip_tokenizer_init:
        return None
    structured = config.structured
    limits = CellLimits(structured.grammar_token_ms / 1e3, structured.grammar_request_timeout,
                        parse_bytes(structured.grammar_memory, "grammar_memory"), structured.grammar_timeout)
    nursery = {"options": dict(options), "vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids),
               "limits": dataclasses.asdict(limits)}
    return IsolatedGrammars(functools.partial(start_nursery, nursery), limits,
                            parse_bytes(structured.grammar_cache_memory, "grammar_cache_memory"),
                            structured.grammar_threads)


def build_cache(config: EngineConfig, spec: DecoderSpec, pool: PoolSize, cost: MoveCost | None) -> KVCacheManager:
    """The bookkeeping of a pool and, where there is swap space, of the host tier beneath it."""
    groups = groups_with_draft(spec, pool.draft_bytes_per_token)
    tiers = [HostTier(pool.num_host_blocks, len(groups), config.cache.offload)] if pool.num_host_blocks else []
    secret = config.cache.kv_secret
    return KVCacheManager(
        pool.num_blocks,
        config.cache.block_size,
        groups=tuple(GroupWindow(group.window) for group in groups),
        prefix_caching=config.cache.enable_prefix_caching,
        eviction_policy=config.cache.eviction_policy,
        secret=None if secret is None else derived_secret(secret, "prefix"),
        tiers=tiers,
        cost=cost,
        block_bytes=tuple(group.bytes_per_token * config.cache.block_size for group in groups),
        group_blocks=tuple(pool.blocks_of(group.window) for group in groups),
    )


def limits_of(config: EngineConfig, max_model_len: int) -> Limits:
    """The scheduler's limits; without chunking a step holds a whole prompt unless the user said otherwise.

    Stages of a pipeline have short steps: one waits for the first chunk of a prompt as long as the stages before it
    compute it, and for each step that is dearer than the one before. All that decode in a step fit."""
    options, stages = config.scheduler, config.parallel.pipeline_parallel_size
    budget = options.max_num_batched_tokens
    if budget is None:
        budget = CPU_DEFAULTS.max_num_batched_tokens
        if stages > 1:
            budget = max(_STAGE_TOKENS, -(-options.num_seqs(gpu=False) // stages))
        if not options.enable_chunked_prefill:
            budget = max(CPU_DEFAULTS.max_num_batched_tokens, max_model_len)
    return Limits(
        max_num_seqs=options.num_seqs(gpu=config.model.device == "cuda"),
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        chunked_prefill=options.enable_chunked_prefill,
        max_num_partial_prefills=options.max_num_partial_prefills,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        fetch_timeout=config.cache.kv_fetch_timeout,
        num_stages=stages,
    )
