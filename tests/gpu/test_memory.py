"""Memory of a real GPU: measured, given back, and named when it runs out. Run it alone: others' use would show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.config import CacheConfig
    from quire.errors import OutOfMemoryError
    from quire.worker.gpu.worker import DeviceOptions, GpuWorker
    from tests.gpu.models import config_of, device_engine, greedy
    from tests.worker.gpu import engines


def worker_of(**options: Any) -> Any:
    cache = CacheConfig(**{"block_size": 16, **options.pop("cache", {})})
    return GpuWorker(engines.QWEN3, None, cache, DeviceOptions(max_num_seqs=4, max_model_len=200, **options))


def test_a_closed_engine_gives_its_memory_back() -> None:
    worker_of(cache={"kv_cache_memory": "1GiB"}).close()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        worker = worker_of(cache={"kv_cache_memory": "4GiB"})
        assert torch.cuda.mem_get_info()[0] < free - (3 << 30)
        worker.close()
        assert torch.cuda.mem_get_info()[0] > free - (128 << 20)


def test_a_second_engine_takes_what_the_first_left() -> None:
    total = torch.cuda.mem_get_info()[1]
    first = worker_of(gpu_memory_utilization=0.3)
    second = worker_of(gpu_memory_utilization=0.5)
    assert total - torch.cuda.mem_get_info()[0] < 0.52 * total
    assert 0.5 < second.pool.num_blocks / first.pool.num_blocks < 1.0
    first.close()
    second.close()


def test_too_little_memory_says_what_to_change() -> None:
    with pytest.raises(OutOfMemoryError, match="gpu_memory_utilization"):
        worker_of(gpu_memory_utilization=0.005)
    with pytest.raises(OutOfMemoryError, match="num_kv_blocks"):
        worker_of(cache={"num_kv_blocks": 1 << 29})


def test_running_out_in_a_step_fails_that_step_and_names_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    core = device_engine(config_of("llama"), depth=1, dtype="float32")
    runner = core.executor._worker._runner
    launch, calls = runner.run, []

    def failing(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) in (3, 4):  # a step is tried twice
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return launch(plan)

    monkeypatch.setattr(runner, "run", failing)
    lost = engines.run(core, greedy(2))
    assert all("max_num_batched_tokens" in (error or "") for *_, error in lost.values())
    again = engines.run(core, greedy(3)[2:])
    assert [error for *_, error in again.values()] == [None]
    core.close()
