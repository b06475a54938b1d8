"""Owns a model on a device with its cache and request table, and carries out plans on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.cpu.ops import CpuOps
from quire.models.build import build_decoder, dummy_weights
from quire.models.loader.source import ModelSource
from quire.models.registry import read_spec
from quire.scheduler.plan import StepPlan, StepResult
from quire.worker.cache_engine import CacheEngine
from quire.worker.memory import PoolSize, check_weights_fit, size_pool
from quire.worker.model_runner import ModelRunner
from quire.worker.request_table import RequestTable


class Worker:
    """Plans in, results out. Built from a model source; sizes its own memory before it loads a weight."""

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        check_device(config)
        seqs = config.scheduler.max_num_seqs or 128
        self.spec = read_spec(source.config)
        self.pool: PoolSize = size_pool(self.spec, config.cache, config.model.max_model_len, seqs)
        dummy = config.model.load_format == "dummy"
        check_weights_fit(self.spec, packed=source.path.suffix == ".gguf" and not dummy)
        ops = CpuOps(num_threads=config.model.num_threads)
        weights = dummy_weights(source.config, config.model.seed) if dummy else source.weights()
        decoder = build_decoder(source.config, weights, ops, max_model_len=self.pool.max_model_len)
        self._cache = CacheEngine(decoder, ops, self.pool.num_blocks, config.cache.block_size,
                                  self.pool.num_host_blocks)
        self._table = RequestTable(seqs, self.pool.max_model_len, config.cache.block_size,
                                   len(self.spec.cache_groups()))
        self._runner = ModelRunner(decoder, self._cache, self._table)

    def execute(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode(), _one_torch_thread():
            self._table.apply(plan)
            if plan.copies:
                self._cache.copy(plan.copies)
            return StepResult(plan.step, self._runner.run(plan.entries))

    def close(self) -> None:
        """Give the memory of cache and weights back even while somebody still holds the worker."""
        for name in ("_runner", "_cache", "_table"):
            self.__dict__.pop(name, None)


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
