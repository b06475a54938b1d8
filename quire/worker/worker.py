"""Owns a model on a CPU, its KV cache and its request table, and executes plans on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.cpu.file_pages import forget_file_pages
from quire.kernels.quantized import StoredWeight
from quire.kernels.routing import LayerLoad
from quire.kvtransfer.store import KVStore
from quire.models.build import build_decoder, stored_parts, undrawn_weights
from quire.models.decoder import Decoder
from quire.models.heads.build import build_head
from quire.models.heads.ends import HeadTarget, whole_ends
from quire.models.heads.head import DraftHead
from quire.models.heads.mtp import build_mtp
from quire.models.loader.source import ModelSource
from quire.models.registry import read_spec
from quire.models.shard import Shard, shard_of
from quire.models.stored_parts import StoredParts
from quire.ops.cpu import CpuOps
from quire.parallel.collectives import Collectives
from quire.parallel.place import Place
from quire.parallel.shared_head import HeadHelper
from quire.scheduler.plan import StepPlan, StepResult
from quire.speculation.options import EAGLE, MTP, REJECTION, SKIP_LAYERS, SpeculationOptions
from quire.worker.cache_engine import CacheEngine
from quire.worker.draft_memory import draft_kv, draft_parameters, draft_source, head_spec
from quire.worker.draft_models import SkippedLayers, SmallerModel, reading_draft_model
from quire.worker.drafter import Drafter, Proposer, ToldDrafter
from quire.worker.eagle import EagleDrafts
from quire.worker.memory import (
    PoolSize,
    available_memory,
    check_weights_fit,
    draft_group,
    groups_with_draft,
    size_pool,
    step_tokens_of,
)
from quire.worker.model_runner import ModelRunner
from quire.worker.passes import Passes
from quire.worker.request_table import RequestTable
from quire.worker.stage_head import share_head
from quire.worker.torch_threads import one_torch_thread
from quire.worker.transfer import KVTransfer
from quire.worker.tree_drafter import TreeDrafter


class Worker:
    """Plans in, results out. Built from a model source; sizes its KV pool before it loads a weight.

    With a `shard` it is one rank of several: each rank gets every plan, holds its share of weights and KV, and talks
    to the others through `collectives`. `pool` is the size all ranks agreed on (`size_shard_pool`, `smallest_pool`).
    """

    launch = None
    """None: the step is complete when `execute` returns."""

    def __init__(self, source: ModelSource, config: EngineConfig, shard: Shard | None = None,
                 collectives: Collectives | None = None, pool: PoolSize | None = None) -> None:
        check_device(config)
        self.spec = read_spec(source.config).with_kv_dtype(config.cache.kv_cache_dtype)
        self.shard = shard = shard_of(self.spec, Place()) if shard is None else shard
        self.pool: PoolSize = size_shard_pool(source, config, shard) if pool is None else pool
        self._ops = ops = CpuOps(num_threads=config.model.num_threads, rounding=config.model.rounding)
        parts = None if shard.is_whole else stored_parts(source.config, shard)
        forget_file_pages()  # file pages of imported libraries, to make room for weights
        decoder = build_decoder(
            source.config, _weights(source, config.model.load_format, config, parts), ops,
            max_model_len=self.pool.max_model_len, asked_len=self.spec.asked_len(config.model.max_model_len),
            shard=shard, ranks=None if collectives is None else collectives.group, dtype=None)
        self.weight_bytes = decoder.weight_bytes
        # A piece of a shared head runs on one thread; a rank with more threads computes the whole head faster alone.
        shares = collectives is not None and config.model.num_threads == 1
        self._helper = share_head(decoder, collectives.head if collectives and shares else None)
        draft = self._draft(source, config, ops, decoder)
        ops.library.quire_give_back()  # buffers through which the weights were read
        groups = groups_with_draft(self.spec, self.pool.draft_bytes_per_token)
        self._cache = CacheEngine(decoder, ops, [self.pool.blocks_of(group.window) for group in groups],
                                  config.cache.block_size,
                                  self.pool.num_host_blocks, draft=draft, draft_group=draft_group(self.spec))
        self.arrivals = self._cache.arrivals
        self._table = RequestTable(config.scheduler.num_seqs(gpu=False), self.pool.max_model_len,
                                   config.cache.block_size, len(groups))
        speculation = config.speculation.options
        rejection = speculation is not None and speculation.verifier == REJECTION
        states = head_spec(speculation, config, self.spec).states if speculation and speculation.reads_states else ()
        drafter = None if speculation is None else self._drafter(
            speculation, rejection, decoder, draft, Passes(decoder, collectives), states)
        self._expert_load = decoder.expert_load
        self._runner = ModelRunner(decoder, self._cache, self._table, drafter, rejection, collectives)

    def _draft(self, target_source: ModelSource, config: EngineConfig, ops: CpuOps, target: Decoder
               ) -> Decoder | DraftHead | None:
        """A draft model, whole, on the first tensor rank of every stage; or a draft head, on that of the last stage."""
        speculation, place = config.speculation.options, self.shard.place
        if speculation is None or not speculation.own_kv or place.tensor_rank != 0:
            return None
        if speculation.reads_states and not place.is_last:
            return None
        ends: HeadTarget = target
        if speculation.reads_states:
            ends = whole_ends(target_source.config, target,
                              lambda parts: _weights(target_source, config.model.load_format, config, parts))
        if speculation.method == MTP:
            return build_mtp(target_source, ends, self.pool.max_model_len)
        with reading_draft_model(speculation.model):
            source = draft_source(speculation, config)
            if speculation.method == EAGLE:
                return build_head(source.config, source.weights(None), ends, self.pool.max_model_len)
            spec = read_spec(source.config).with_kv_dtype(config.cache.kv_cache_dtype)
            return build_decoder(source.config, _weights(source, speculation.load_format, config), ops,
                                 max_model_len=self.pool.max_model_len, asked_len=target.asked_len,
                                 shard=shard_of(spec, Place()), dtype=None)

    def _drafter(self, speculation: SpeculationOptions, rejection: bool, decoder: Decoder,
                 draft: Decoder | DraftHead | None, passes: Passes, states: Sequence[str]) -> Proposer | None:
        """`states`: names of the target's hidden states that a head reads."""
        if speculation.method == SKIP_LAYERS:
            shared = None if passes.alone else passes
            skipped = SkippedLayers(decoder, self._cache.layers, self._table, speculation.skipped_layers, passes)
            return self._with_trees(Drafter(skipped, self._table, rejection, shared), speculation)
        if not speculation.own_kv:
            return None
        proposer: Proposer | None = None
        if draft is not None:
            kept = (self._cache.draft_layers, self._table, draft_group(self.spec), self.pool.num_blocks,
                    self.pool.num_host_blocks)
            model = (EagleDrafts(draft, *kept, self._ops, speculation.chain_floor, speculation.careful_floor)
                     if isinstance(draft, DraftHead) else SmallerModel(draft, *kept))
            proposer = self._with_trees(Drafter(model, self._table, rejection), speculation)
        if speculation.reads_states and not passes.alone:
            return ToldDrafter(proposer, passes.tell_all, states if self.shard.place.tensor_rank == 0 else ())
        if proposer is None or self.shard.place.tensor_size > 1:
            return ToldDrafter(proposer, passes.tell_group)
        return proposer

    def _with_trees(self, drafter: Drafter, speculation: SpeculationOptions) -> Proposer:
        if speculation.tree is None:
            return drafter
        return TreeDrafter(drafter, self._table, speculation.tree, speculation.verifier == REJECTION)

    def kv_memory(self) -> KVStore:
        """The KV caches, or this rank's share of them, for transfers to and from other engines."""
        return KVStore(self._cache.layers, self._cache.groups, first_layer=self.shard.first_layer,
                       heads=self.shard.kv_heads)

    def device_bytes(self) -> int:
        return 0

    def expert_load(self) -> list[LayerLoad]:
        """Tokens per expert for this rank's layers, counting the experts of all tensor ranks."""
        return self._expert_load.as_data()

    def connect(self, transfer: KVTransfer) -> None:
        """Add a tier that blocks can be moved to and from."""
        self._cache.connect(transfer)

    def execute(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode(), one_torch_thread():
            try:
                self._prepare(plan)
            except BaseException as error:
                self._cache.refuse_transfers(plan, error)
                raise
            self._cache.start_transfers(plan)
            return StepResult(plan.step, self._runner.run(plan.entries), self.arrivals.take())

    def touch_cache(self) -> None:
        """Write to the whole KV pool, so that all its pages take memory; for measurements."""
        for layer in self._cache.layers:
            for part in layer.tensors.values():
                part.zero_()

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """Tokens drawn for a row by a later pipeline stage, the first at `position`; called before the plan that
        continues the row. Does nothing if the row is empty."""
        with torch.inference_mode():
            self._runner.learn(row, position, tokens)

    def _prepare(self, plan: StepPlan) -> None:
        self._table.apply(plan)
        self._cache.copy(plan.copies)
        drafter = self._runner.drafter
        if drafter is not None:
            drafter.model.copied(plan.copies)
            drafter.model.moved(plan.transfers)
        for start in plan.starts:
            self._runner.restart(start.row)

    def close(self) -> None:
        """Free cache and weights, even if something still refers to this worker."""
        helper: HeadHelper | None = self.__dict__.get("_helper")
        if helper is not None:
            helper.close()
        if "_cache" in self.__dict__:
            self._cache.close()
        for name in ("_runner", "_cache", "_table", "_helper"):
            self.__dict__.pop(name, None)


def size_shard_pool(source: ModelSource, config: EngineConfig, shard: Shard, ranks_here: int = 1) -> PoolSize:
    """The KV pool that the rank with this shard can hold; `ranks_here` ranks share this machine's memory. Raises if the
    weights of the shard do not fit. Loads nothing."""
    spec = shard.spec
    free = available_memory() // ranks_here
    pool = size_pool(spec, config.cache, config.model.max_model_len, config.scheduler.num_seqs(gpu=False), free,
                     draft=draft_kv(config, spec), shard=shard, step_tokens=step_tokens_of(config))
    dummy = config.model.load_format == "dummy"
    packed = (source.path.suffix == ".gguf" and not dummy) or config.model.rounding is not None
    check_weights_fit(shard.num_parameters + draft_parameters(config, shard), packed=packed, free=free)
    return pool


def _weights(source: ModelSource, load_format: str, config: EngineConfig,
             parts: StoredParts | None = None) -> Iterator[tuple[str, StoredWeight]]:
    """The weights, or those in `parts`; each is read or drawn only when it is packed, to save memory."""
    if load_format == "dummy":
        return undrawn_weights(source.config, config.model.seed, parts)
    return source.unread_weights(parts)


def check_device(config: EngineConfig) -> None:
    """Refuse what this build cannot run on."""
    if config.model.dtype not in ("auto", "float32"):
        raise ConfigError(f"dtype {config.model.dtype!r} is not supported on a CPU, which computes in float32: "
                          "use dtype='auto'", field="dtype")
