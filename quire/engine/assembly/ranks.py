"""Puts the ranks of an engine together from its configuration: which there are, what each runs, who starts them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.assembly.no_worker import NoWorker
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.models.registry import read_spec
from quire.models.shard import Shard, shard_of
from quire.models.spec import DecoderSpec
from quire.parallel.place import Place
from quire.ranks.executor import RankExecutor
from quire.ranks.local import same_for_all, start_local
from quire.ranks.shared_kv import SharedKV
from quire.ranks.workers import DUMMY, MODEL
from quire.speculation.options import DRAFT_MODEL
from quire.worker.memory import PoolSize, available_memory, size_pool, smallest_pool

if TYPE_CHECKING:
    from quire.models.loader.source import ModelSource
    from quire.worker.unit_transfer import UnitTransfer


class RankedWorker:
    """Stands for the workers of all ranks: the KV that they share is one memory."""

    def __init__(self, spec: DecoderSpec, pool: PoolSize, executor: RankExecutor) -> None:
        self.spec, self.pool = spec, pool
        self._executor = executor
        self._kv: SharedKV | None = None

    def kv_memory(self) -> SharedKV:
        if self._kv is None:
            self._kv = SharedKV(self._executor, self._executor.listen_to_kv)
        return self._kv

    def connect(self, transfer: UnitTransfer) -> None:
        transfer.use(self.kv_memory(), self.kv_memory())
        self._executor.add_tier(transfer)


def build_ranks(source: ModelSource, config: EngineConfig) -> tuple[RankedWorker | NoWorker, Executor]:
    """Ranks that wait for plans, and what is known of all of them."""
    spec = read_spec(source.config).with_kv_dtype(config.cache.kv_cache_dtype)
    check_parallel(config)
    parallel = config.parallel
    places = Place.all(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    # Refuses sizes that cannot work before any process is started.
    shards = [shard_of(spec, place) for place in places]
    if config.model.executor == "dummy":
        pool = _pool_without_weights(config, shards)
        executor, _ = _start(config, places, {"kind": DUMMY, "vocab_size": spec.vocab_size,
                                              "step_seconds": config.model.dummy_step_ms / 1e3}, same_for_all)
        return NoWorker(spec, pool), executor
    executor, agreed = _start(config, places, {"kind": MODEL, "options": _rank_options(config)}, _smallest)
    return RankedWorker(spec, PoolSize(**agreed), executor), executor


def _pool_without_weights(config: EngineConfig, shards: list[Shard]) -> PoolSize:
    """What ranks with such shards would have."""
    free = available_memory() // len(shards)
    return smallest_pool([
        size_pool(shard.spec, config.cache, config.model.max_model_len, config.scheduler.num_seqs(gpu=False), free,
                  shard=shard)
        for shard in shards
    ])


def _start(config: EngineConfig, places: list[Place], worker: dict[str, Any],
           agree: Any) -> tuple[RankExecutor, dict[str, Any]]:
    parallel = config.parallel
    if parallel.backend == "mp":
        return start_local(places, worker, agree)
    if parallel.backend == "threads":
        from quire.ranks.threads import ThreadExecutor, start_threads

        threads = ThreadExecutor(places)
        return threads, start_threads(threads, worker, agree)
    from quire.ranks.ray_launch import start_ray

    gpus = 1 if config.model.device == "cuda" and worker["kind"] == MODEL else 0
    return start_ray(places, worker, agree, parallel.ray_address, config.model.num_threads or 1, gpus=gpus)


def check_parallel(config: EngineConfig) -> None:
    """Refuse what ranks cannot do."""
    if config.model.device == "cuda":
        _check_gpu_ranks(config)
    for name, value in (("kv_role", config.transfer.kv_role), ("kv_disk", config.cache.kv_disk),
                        ("kv_pool", config.cache.kv_pool)):
        if value is not None and config.parallel.backend == "ray":
            raise ConfigError(f"{name} needs ranks that share memory with their engine, and actors of Ray may be on "
                              "other machines: leave it out, or use distributed_executor_backend='mp'", field=name)
    if config.model.dummy_script is not None:
        raise ConfigError("dummy_script is played by one process: leave out the parallel sizes", field="dummy_script")


def _check_gpu_ranks(config: EngineConfig) -> None:
    if config.parallel.backend == "threads":
        raise ConfigError("ranks on GPUs are processes: use distributed_executor_backend 'mp' or 'ray', or "
                          "device='cpu'", field="distributed_executor_backend")
    speculation = config.speculation.options
    if speculation is None or not speculation.on_device:
        return
    if config.parallel.pipeline_parallel_size > 1 and not speculation.reads_states:
        raise ConfigError(f"drafts by method {speculation.method!r} are not made on GPUs of several stages so far: use "
                          "method 'eagle', 'mtp', 'ngram' or 'suffix', pipeline_parallel_size=1, or device='cpu'",
                          field="speculative_config")
    if speculation.method == DRAFT_MODEL and not config.model.deterministic:
        raise ConfigError("a draft model runs whole on every rank, and only deterministic mode makes sure that all "
                          "propose the same: use deterministic=True, or method 'skip_layers', 'ngram' or 'suffix'",
                          field="speculative_config")


def _rank_options(config: EngineConfig) -> dict[str, Any]:
    """What every rank is told. Unless the user said how many threads each has, the cores of this machine are dealt to
    the ranks; an actor of Ray has one."""
    threads = config.model.num_threads
    if threads is None and config.parallel.backend == "ray":
        threads = 1
    elif threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // config.parallel.num_ranks)
    model = dataclasses.replace(config.model, num_threads=threads)
    return dataclasses.replace(config, model=model).to_options()


def _smallest(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """The pool that every rank can hold."""
    return dataclasses.asdict(smallest_pool([PoolSize(**size) for size in sizes]))
