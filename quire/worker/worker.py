"""Owns a model on a device with its cache and request table, and carries out plans on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.types import LayerCache
from quire.models.build import build_decoder, dummy_weights
from quire.models.loader.source import ModelSource, resolve_model
from quire.models.registry import read_spec
from quire.ops.cpu import CpuOps
from quire.scheduler.plan import StepPlan, StepResult
from quire.speculation.options import REJECTION, SKIP_LAYERS, SpeculationOptions
from quire.worker.cache_engine import CacheEngine
from quire.worker.draft_models import SkippedLayers, SmallerModel, check_same_vocabulary, reading_draft_model
from quire.worker.drafter import Drafter, DraftModel
from quire.worker.memory import PoolSize, check_weights_fit, draft_group, groups_with_draft, size_pool
from quire.worker.model_runner import ModelRunner
from quire.worker.request_table import RequestTable
from quire.worker.transfer import KVTransfer


class Worker:
    """Plans in, results out. Built from a model source; sizes its own memory before it loads a weight."""

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        check_device(config)
        seqs = config.scheduler.num_seqs(gpu=False)
        self.spec = read_spec(source.config)
        speculation = config.speculation.options
        name = None if speculation is None else speculation.model
        with reading_draft_model(name):
            draft = _draft_source(speculation, config)
            draft_spec = None if draft is None else read_spec(draft.config)
        if draft_spec is not None:
            check_same_vocabulary(self.spec, draft_spec)
        self.pool: PoolSize = size_pool(
            self.spec, config.cache, config.model.max_model_len, seqs,
            draft_bytes_per_token=0 if draft_spec is None else draft_spec.kv_bytes_per_token)
        dummy = config.model.load_format == "dummy"
        check_weights_fit(self.spec, packed=source.path.suffix == ".gguf" and not dummy)
        ops = CpuOps(num_threads=config.model.num_threads)
        weights = _weights(source, config.model.load_format, config)
        decoder = build_decoder(source.config, weights, ops, max_model_len=self.pool.max_model_len)
        group = draft_group(self.spec)
        with reading_draft_model(name):
            draft_decoder = None if draft is None or speculation is None else build_decoder(
                draft.config, _weights(draft, speculation.load_format, config), ops,
                max_model_len=self.pool.max_model_len)
        self._cache = CacheEngine(decoder, ops, self.pool.num_blocks, config.cache.block_size,
                                  self.pool.num_host_blocks, draft=draft_decoder, draft_group=group)
        self.arrivals = self._cache.arrivals
        self._table = RequestTable(seqs, self.pool.max_model_len, config.cache.block_size,
                                   len(groups_with_draft(self.spec, self.pool.draft_bytes_per_token)))
        rejection = speculation is not None and speculation.verifier == REJECTION
        model: DraftModel | None = None
        if draft_decoder is not None:
            model = SmallerModel(draft_decoder, self._cache.draft_layers, self._table, group, self.pool.num_blocks,
                                 self.pool.num_host_blocks)
        elif speculation is not None and speculation.method == SKIP_LAYERS:
            model = SkippedLayers(decoder, self._cache.layers, self._table, speculation.skipped_layers)
        drafter = None if model is None else Drafter(model, self._table, rejection)
        self._runner = ModelRunner(decoder, self._cache, self._table, drafter, rejection)

    @property
    def kv_layers(self) -> tuple[list[LayerCache], list[int]]:
        """The model's caches and the cache group of each, for whoever moves KV to and from other engines."""
        return self._cache.layers, self._cache.groups

    def connect(self, transfer: KVTransfer) -> None:
        """Move blocks to and from one more tier."""
        self._cache.connect(transfer)

    def execute(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode(), _one_torch_thread():
            try:
                self._prepare(plan)
            except BaseException as error:
                self._cache.refuse_transfers(plan, error)
                raise
            self._cache.start_transfers(plan)
            return StepResult(plan.step, self._runner.run(plan.entries), self.arrivals.take())

    def _prepare(self, plan: StepPlan) -> None:
        self._table.apply(plan)
        self._cache.copy(plan.copies)
        drafter = self._runner.drafter
        if drafter is not None:
            drafter.model.copied(plan.copies)
            drafter.model.moved(plan.transfers)
            for start in plan.starts:
                drafter.model.restart(start.row)

    def close(self) -> None:
        """Give the memory of cache and weights back even while somebody still holds the worker."""
        if "_cache" in self.__dict__:
            self._cache.close()
        for name in ("_runner", "_cache", "_table"):
            self.__dict__.pop(name, None)


def _draft_source(speculation: SpeculationOptions | None, config: EngineConfig) -> ModelSource | None:
    if speculation is None or speculation.model is None:
        return None
    return resolve_model(speculation.model, load_format=speculation.load_format, cache_dir=config.model.cache_dir)


def _weights(source: ModelSource, load_format: str, config: EngineConfig) -> Iterator[tuple[str, torch.Tensor]]:
    return dummy_weights(source.config, config.model.seed) if load_format == "dummy" else source.weights()


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The kernels have threads of their own; torch's would spin on the same cores between its few small operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_device(config: EngineConfig) -> None:
    """Refuse what this build cannot run on."""
    if config.model.dtype not in ("auto", "float32"):
        raise ConfigError(f"dtype {config.model.dtype!r} is not supported on a CPU, which computes in float32: "
                          "use dtype='auto'", field="dtype")
