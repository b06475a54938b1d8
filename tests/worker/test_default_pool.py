"""Without options a KV pool has 1 GiB for each stage of a pipeline, or less where less memory is free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM
from quire.bench.gpu.cases import MODELS
from quire.config import EngineConfig
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.parallel.place import Place
from quire.worker.memory import PoolSize, size_pool, smallest_pool

QWEN3 = MODELS["0.6b"]
GIB = 1 << 30
LENGTH = 2048


def pool_of(tensor_size: int, num_stages: int, free: int = 16 * GIB) -> PoolSize:
    """Of ranks that may have `free` bytes each."""
    spec, cache = read_spec(QWEN3), EngineConfig.create(model="qwen3").cache
    return smallest_pool([size_pool(spec, cache, LENGTH, 128, free, shard=shard_of(spec, place))
                          for place in Place.all(tensor_size, num_stages)])


@pytest.mark.parametrize(("tensor_size", "num_stages", "gib"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 4, 4)])
def test_a_pipelines_pool_grows_with_its_stages(tensor_size: int, num_stages: int, gib: int) -> None:
    pool = pool_of(tensor_size, num_stages)
    assert gib * GIB - pool.bytes_per_block < pool.num_bytes <= gib * GIB


def test_no_rank_takes_more_than_its_part_of_what_is_free() -> None:
    """Two stages of 14 layers each hold half of a block."""
    pool = pool_of(1, 2, free=GIB)
    assert 0.79 * GIB < pool.num_bytes <= 0.8 * GIB


def test_an_engine_without_weights_has_the_pool_of_the_real_one(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    monkeypatch.setattr("quire.engine.assembly.ranks.available_memory", lambda: 32 * GIB)
    with LLM(str(tmp_path), executor="dummy", load_format="dummy", skip_tokenizer_init=True, device="cpu",
             max_model_len=LENGTH, pipeline_parallel_size=2, distributed_executor_backend="threads") as llm:
        assert llm.metrics()["kv_pool_bytes"] == pool_of(1, 2).num_bytes
