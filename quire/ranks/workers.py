"""What a rank may run: the model's share, or something without a model that shows what happens around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from quire.kernels.routing import LayerLoad
from quire.ranks.start import RankStart
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.kvtransfer.memory import KVMemory
    from quire.parallel.collectives import Collectives

Agree = Callable[[dict[str, Any]], dict[str, Any]]
"""Says what this rank could hold, and waits for what all of them will."""
MODEL, DUMMY, KV_HASH = "model", "dummy", "kv_hash"


class RankWorker(Protocol):
    """What a rank needs of its worker."""

    @property
    def arrivals(self) -> ArrivalBox:
        """Where its transfers report."""

    @property
    def launch(self) -> Callable[[StepPlan], Future[StepResult]] | None:
        """`execute` of a worker that can take the next plan while a step is under way; steps end in their order."""

    def execute(self, plan: StepPlan) -> StepResult:
        """One step. Entries are empty but on the rank that draws."""

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """Tokens that another stage has drawn for a row, before the next step."""

    def kv_memory(self) -> KVMemory | None:
        """Its share of the KV, for transfers beside the steps; None without a model."""

    def expert_load(self) -> list[LayerLoad]:
        """What the experts of its layers have done."""

    def device_bytes(self) -> int:
        """Of a GPU's memory that its process holds; 0 on a CPU."""

    def close(self) -> None: ...


def build_rank_worker(start: RankStart, collectives: Collectives | None, agree: Agree) -> RankWorker:
    settings = dict(start.worker)
    kind = settings.pop("kind")
    if kind == MODEL:
        return _model(start, collectives, agree, settings["options"])
    agree({})
    if kind == DUMMY:
        return _DummyRank(start, **settings)
    if kind == KV_HASH:
        from quire.ranks.kv_hash_rank import KVHashRank

        return KVHashRank(start.place, collectives, **settings)
    raise ValueError(f"there is no worker {kind!r}")


def _model(start: RankStart, collectives: Collectives | None, agree: Agree, options: dict[str, Any]) -> RankWorker:
    from quire.config import EngineConfig
    from quire.models.loader.source import resolve_model
    from quire.models.registry import read_spec
    from quire.models.shard import shard_of
    from quire.worker.memory import PoolSize
    from quire.worker.worker import Worker, size_shard_pool

    config = EngineConfig.create(**options)
    model = config.model
    if model.device == "cuda":
        from quire.worker.gpu.rank import build_gpu_rank

        return build_gpu_rank(config, start.place, collectives, agree, start.gpu)
    source = resolve_model(model.model, tokenizer=model.tokenizer, load_format=model.load_format,
                           cache_dir=model.cache_dir, progress=False)
    shard = shard_of(read_spec(source.config).with_kv_dtype(config.cache.kv_cache_dtype), start.place)
    pool = size_shard_pool(source, config, shard, start.ranks_here)
    agreed = PoolSize(**agree(dataclasses.asdict(pool)))
    return Worker(source, config, shard, collectives, agreed)


class _DummyRank:
    """No model: tokens are made up on the rank that draws."""

    launch = None

    def __init__(self, start: RankStart, vocab_size: int, step_seconds: float = 0.0) -> None:
        from quire.executor.dummy import DummyExecutor

        self._executor = DummyExecutor(vocab_size, step_seconds)
        self._sampler = start.place.is_sampler
        self.arrivals = ArrivalBox()

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._executor.execute(plan)
        return result if self._sampler else StepResult(plan.step, [], result.arrivals)

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        pass

    def kv_memory(self) -> KVMemory | None:
        return None

    def expert_load(self) -> list[LayerLoad]:
        return []

    def device_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass
