"""Chooses where a model runs, and what the options mean there; asks torch, so it is imported late."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from typing import TYPE_CHECKING, Protocol

from quire.config import EngineConfig, ModelConfig, SchedulerConfig
from quire.engine.assembly.no_worker import NoWorker
from quire.errors import ConfigError
from quire.executor.base import Executor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire.kernels.quantized import StoredWeight
    from quire.kvtransfer.memory import KVMemory
    from quire.models.loader.source import ModelSource
    from quire.models.spec import DecoderSpec
    from quire.worker.gpu.compile_ahead.processes import Compilers
    from quire.worker.gpu.compile_ahead.start import CompileAhead
    from quire.worker.gpu.options import DeviceOptions
    from quire.worker.memory import PoolSize
    from quire.worker.unit_transfer import UnitTransfer


log = logging.getLogger("quire.engine")


class ModelWorker(Protocol):
    """What the assembly needs to know of a worker, whatever it runs on."""

    spec: DecoderSpec
    pool: PoolSize

    def kv_memory(self) -> KVMemory | None:
        """Its KV, for transfers to and from other engines; None without a model."""

    def connect(self, transfer: UnitTransfer) -> None:
        """Move blocks to and from one more tier."""
        ...


def resolve(config: EngineConfig, source: ModelSource | None = None) -> EngineConfig:
    """The same with device, and what the user left to device and file, filled in. `source` None: a file of floats."""
    # The dummy executor computes nothing: no need to look for a GPU, nor to import torch.
    device = "cpu" if config.model.executor == "dummy" else config.model.device
    missing = None if device == "cpu" else missing_for_gpu()
    if device == "cuda" and missing is not None:
        raise ConfigError(f"device 'cuda' cannot be used: {missing}; use device='cpu' or 'auto'", field="device")
    gpu = device != "cpu" and missing is None
    _check_kv_dtype(config.cache.kv_cache_dtype, gpu)
    _check_quantization(config, gpu)
    _check_rank_exchange(config, gpu)
    _check_compile_ahead(config, gpu, source)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, device="cuda" if gpu else "cpu",
                                  quantization=_quantization(config.model, source, gpu)),
        scheduler=_with_a_step_for_every_stage(config).resolved(gpu),
    )


def _quantization(model: ModelConfig, source: ModelSource | None, gpu: bool) -> str | None:
    """A GPU keeps whatever quantized weights a file has, a CPU its integers, unless floats are asked for
    (docs/quantization.md says why)."""
    if model.asks_for_floats and source is not None and source.stores_codes:
        log.info("dtype=%r makes floats of the quantized weights of %s: quantization='file' keeps their bits",
                 model.dtype, source.name)
    if model.quantization is not None or model.asks_for_floats or source is None:
        return model.quantization
    return "file" if (source.stores_codes if gpu else source.stores_integers) else None


def _check_quantization(config: EngineConfig, gpu: bool) -> None:
    """Which formats a device makes of weights."""
    wanted = config.model.quantization
    if not gpu and wanted == "fp8":
        raise ConfigError("quantization 'fp8' needs a GPU: use int8 or int4 on a CPU", field="quantization")
    if not gpu or wanted is None:
        return
    if config.model.dtype == "float32":
        raise ConfigError(f"quantization {wanted!r} multiplies rows in 16 bits or fp8: use dtype='bfloat16'",
                          field="quantization")


def _check_compile_ahead(config: EngineConfig, gpu: bool, source: ModelSource | None) -> None:
    """Refuse it where nothing would be compiled ahead, whatever the machine."""
    sizes = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    codes = source is not None and keeps_codes(source, config)
    for fault, why in ((not gpu, "a CPU compiles nothing at start"),
                       (sizes > 1, "it is not done over several ranks so far"),
                       (codes, "kernels of weights that a file stores quantized are known when they are loaded"),
                       (config.model.enforce_eager, "enforce_eager captures no steps whose kernels could be known")):
        if config.model.compile_ahead and fault:
            raise ConfigError(f"compile_ahead cannot be used: {why}; leave it out", field="compile_ahead")


def _check_rank_exchange(config: EngineConfig, gpu: bool) -> None:
    if config.parallel.rank_exchange != "nccl":
        return
    if not gpu or config.parallel.tensor_parallel_size == 1:
        raise ConfigError("rank_exchange 'nccl' adds up what tensor ranks on GPUs have: it needs device 'cuda' and "
                          "tensor_parallel_size above 1", field="rank_exchange")
    if config.model.deterministic:
        raise ConfigError("rank_exchange 'nccl' adds in an order of its own, which deterministic rules out: use 'ipc'",
                          field="rank_exchange")


def _check_kv_dtype(kv_cache_dtype: str, gpu: bool) -> None:
    needed, other = ("a CPU", "'auto' or 'fp8'") if gpu else ("a GPU", "'auto' or 'int8'")
    if kv_cache_dtype == ("int8" if gpu else "fp8"):
        raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} needs {needed}: use kv_cache_dtype={other}",
                          field="kv_cache_dtype")


def _with_a_step_for_every_stage(config: EngineConfig) -> SchedulerConfig:
    """A pipeline computes as many steps at once as it has stages."""
    stages, options = config.parallel.pipeline_parallel_size, config.scheduler
    if stages == 1 or options.max_steps_in_flight is not None:
        return options
    return dataclasses.replace(options, max_steps_in_flight=stages)


def draft_rows(config: EngineConfig) -> int:
    """Drafts that a step of the GPU's worker may hold; 0 on a CPU, which needs to know nothing of them."""
    if config.model.device != "cuda":
        return 0
    from quire.worker.gpu.options import draft_rows as rows_of

    return rows_of(config)


def missing_for_gpu() -> str | None:
    """Why no GPU can be used here, or None."""
    import torch

    if torch.version.hip is not None:  # whose torch calls its GPUs cuda too
        return "this torch is built for ROCm (AMD GPUs), and Quire's kernels are for NVIDIA's"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which compiles the GPU kernels, is not installed"
    return None


def build_worker(source: ModelSource, config: EngineConfig,
                 compilers: Compilers | None = None) -> tuple[ModelWorker, Executor]:
    """The worker of a resolved configuration, and who runs plans on it. `compilers`: processes that wait for the
    kernels of a GPU's first start."""
    if config.parallel.distributed:
        from quire.engine.assembly.ranks import build_ranks

        return build_ranks(source, config)
    if config.model.executor == "dummy":
        return _no_worker(source, config)
    if config.model.device == "cuda":
        return _gpu_worker(source, config, compilers)
    if compilers is not None:
        compilers.close()  # torch cannot use this machine's GPU
    from quire.executor.local import LocalExecutor
    from quire.worker.worker import Worker

    worker = Worker(source, config)
    return worker, LocalExecutor(worker, overlap=(config.scheduler.max_steps_in_flight or 1) > 1,
                                 arrivals=worker.arrivals, expert_load=worker.expert_load)


def _no_worker(source: ModelSource, config: EngineConfig) -> tuple[ModelWorker, Executor]:
    """The model's shapes and none of its weights: what is left is the engine around it."""
    from quire.executor.dummy import DummyExecutor
    from quire.models.registry import read_spec
    from quire.worker.memory import size_pool, step_tokens_of

    spec = read_spec(source.config).with_kv_dtype(config.cache.kv_cache_dtype)
    pool = size_pool(spec, config.cache, config.model.max_model_len, config.scheduler.num_seqs(gpu=False),
                     step_tokens=step_tokens_of(config))
    if config.model.dummy_script is not None:
        from quire.executor.scripted import ScriptedExecutor, read_script

        lines = read_script(config.model.dummy_script)
        end = next(iter(source.eos_token_ids), spec.vocab_size - 1)
        return NoWorker(spec, pool), ScriptedExecutor(lines, source.tokenizer, end, spec.vocab_size)
    return NoWorker(spec, pool), DummyExecutor(spec.vocab_size, config.model.dummy_step_ms / 1e3)


def _gpu_worker(source: ModelSource, config: EngineConfig,
                compilers: Compilers | None = None) -> tuple[ModelWorker, Executor]:
    from quire.executor.device import DeviceExecutor
    from quire.models.registry import read_spec
    from quire.worker.gpu.options import device_options
    from quire.worker.gpu.speculation import speculation_of
    from quire.worker.gpu.worker import GpuWorker

    options = device_options(config, read_spec(source.config).max_positions)
    ahead = _compile_ahead(source, config, options, compilers)
    try:
        weights = None if config.model.load_format == "dummy" else _device_weights(source, config)
        worker = GpuWorker(source.config, weights, config.cache, options, speculation=speculation_of(config, source),
                           kernels_ready=None if ahead is None else ahead.wait)
    finally:
        if ahead is not None:
            ahead.close()
    return worker, DeviceExecutor(worker, worker.expert_load)


def _compile_ahead(source: ModelSource, config: EngineConfig, options: DeviceOptions,
                   compilers: Compilers | None) -> CompileAhead | None:
    """Of weights that a file stores quantized nobody knows the kernels before they are loaded."""
    from quire.worker.gpu.compile_ahead.start import compile_ahead

    wanted = config.model.compile_ahead is not False and not keeps_codes(source, config)
    ahead = compile_ahead(source.config, options, config.cache.block_size, compilers) if wanted else None
    if ahead is None and compilers is not None:
        compilers.close()  # nobody will tell them anything
    return ahead


def keeps_codes(source: ModelSource, config: EngineConfig) -> bool:
    """Whether weights stay as the file quantized them."""
    return source.stores_codes and not config.model.asks_for_floats


def _device_weights(source: ModelSource, config: EngineConfig) -> Iterator[tuple[str, StoredWeight]]:
    """Weights that the file stores quantized keep their bits, unless floats are asked for."""
    return source.weights(None) if config.model.asks_for_floats else source.stored_weights()
