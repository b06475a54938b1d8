"""Owns a model on a GPU (or, for tests, on CPU tensors) and launches plans on it without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.config import CacheConfig
from quire.errors import ConfigError, QuireError
from quire.layers.ops import Ops
from quire.models.registry import read_spec
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan, StepResult, TableDiff
from quire.worker.cache_engine import CacheEngine
from quire.worker.gpu.memory import explain, measure_step, size_device_pool
from quire.worker.gpu.results import ResultCopier, failed
from quire.worker.gpu.runner import DeviceRunner
from quire.worker.gpu.table import DeviceTable
from quire.worker.gpu.weights import build_on_device, random_weights
from quire.worker.memory import PoolSize

DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a model runs on a GPU."""

    device: str = "cuda"
    dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    deterministic: bool = False
    kv_cache_dtype: str = "auto"
    dense_prefill: bool = True
    launch_early: bool = False
    """Programmatic dependent launch: a kernel of a small step starts while the one before it ends."""
    seed: int = 0


class GpuWorker:
    """Plans in, futures out. `weights` None: random ones, made on the device."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Iterable[tuple[str, Tensor]] | None,
        cache: CacheConfig,
        options: DeviceOptions,
        ops: Ops | None = None,
    ) -> None:
        self.spec = read_spec(config)
        self.device = torch.device(options.device)
        self._options = options
        dtype = DTYPES[options.dtype]
        self.ops = _device_ops(options, self.device, dtype) if ops is None else ops
        self.timings: dict[str, float] = {}
        started = time.perf_counter()
        length = _length(self.spec.max_positions, options.max_model_len)
        with torch.inference_mode():
            stream = random_weights(config, self.device, dtype, options.seed) if weights is None else weights
            self.decoder = build_on_device(config, stream, self.ops, self.device, dtype, length)
            self._mark("weights", started)
            self.table = DeviceTable(
                options.max_num_seqs,
                length,
                cache.block_size,
                len(self.spec.cache_groups()),
                self.spec.vocab_size,
                self.device,
            )
            self._runner = DeviceRunner(
                self.decoder,
                self.ops,
                self.table,
                self.device,
                max_num_seqs=options.max_num_seqs,
                use_graphs=not options.enforce_eager,
            )
            self.pool = self._size_pool(cache, length)
            self._cache = CacheEngine(self.decoder, self.ops, self.pool.num_blocks + 1, cache.block_size)
            self._runner.caches = self._cache.layers
            started = time.perf_counter()
            if self._runner.graphs is not None:
                self._runner.graphs.capture(self._runner.rungs)
                torch.cuda.synchronize(self.device)
            self._mark("graphs", started)
        self._copier = ResultCopier(self.device)

    def _mark(self, name: str, started: float) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.timings[name] = time.perf_counter() - started

    def _size_pool(self, cache: CacheConfig, length: int) -> PoolSize:
        started = time.perf_counter()
        if self.device.type != "cuda":
            blocks = cache.num_kv_blocks or -(-length // cache.block_size) * 4
            return PoolSize(blocks, min(length, blocks * cache.block_size), 0)
        step = measure_step(lambda: self._largest_step(cache.block_size), self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        element = 1 if self._options.kv_cache_dtype == "fp8" else DTYPES[self._options.dtype].itemsize
        pool = size_device_pool(
            self.spec, cache, length, element, free, total, self._options.gpu_memory_utilization, step
        )
        self._mark("profile", started)
        return pool

    def _largest_step(self, block_size: int) -> None:
        """A step with as many tokens and sequences as the limits allow, over a cache of one block."""
        options = self._options
        groups = len(self.spec.cache_groups())
        self._runner.caches = self.decoder.allocate_caches([2] * groups, block_size)
        seqs = options.max_num_seqs
        each = max(1, min(options.max_num_batched_tokens // seqs, self.table.max_model_len))
        plan = StepPlan(0)
        left = options.max_num_batched_tokens
        for row in range(seqs):
            count = min(each if row < seqs - 1 else left, left, self.table.max_model_len)
            if count < 1:
                break
            left -= count
            blocks = -(-count // block_size)
            plan.starts.append(RowStart(row, [0] * count, count, SamplingParams(temperature=1.0), 0, 0))
            plan.diffs += [TableDiff(row, group, 0, [0] * blocks) for group in range(groups)]
            plan.entries.append(PlanEntry(row, 0, count, sample=True))
        self._runner.run(plan)
        self._runner.run(StepPlan(1, freed_rows=list(range(seqs))))
        self._runner.caches = []

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Launch a plan. Its copies and its step run in order with those before it; the future waits, not
        we."""
        try:
            with torch.inference_mode():
                if plan.copies:
                    self._cache.copy(plan.copies)
                return self._copier.send(self._runner.run(plan))
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return failed(explain(error))
        except (QuireError, RuntimeError) as error:
            return failed(error)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).result()

    def close(self) -> None:
        """Give the memory back even while somebody still holds the worker."""
        if "_copier" in self.__dict__:
            self._copier.close()
        for name in ("_runner", "_cache", "table", "decoder", "ops", "_copier"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _length(max_positions: int, wanted: int | None) -> int:
    if wanted is not None and wanted > max_positions:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {max_positions} positions the model was made for: lower it",
            field="max_model_len",
        )
    return max_positions if wanted is None else wanted


def _device_ops(options: DeviceOptions, device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type != "cuda":
        raise ConfigError("only a GPU has kernels of its own here: hand in the operations of another device", "device")
    from quire.kernels.triton.ops import KV_DTYPES, TritonOps

    return TritonOps(
        device,
        dtype,
        deterministic=options.deterministic,
        kv_dtype=KV_DTYPES[options.kv_cache_dtype],
        dense_prefill=options.dense_prefill,
        pdl=options.launch_early,
    )
