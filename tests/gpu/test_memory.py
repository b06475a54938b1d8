"""Memory of a real GPU: measured, given back, and named when it runs out. Run it alone: others' use would show."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.config import CacheConfig
    from quire.errors import OutOfMemoryError
    from quire.worker.gpu.options import DeviceOptions
    from quire.worker.gpu.worker import GpuWorker
    from tests.gpu.models import config_of, device_engine, greedy
    from tests.worker.gpu import engines


def worker_of(**options: Any) -> Any:
    cache = CacheConfig(**{"block_size": 16, **options.pop("cache", {})})
    return GpuWorker(engines.QWEN3, None, cache, DeviceOptions(max_num_seqs=4, max_model_len=200, **options))


def test_a_closed_engine_gives_its_memory_back() -> None:
    """All of it but what the first engine left for good: libraries, and one cuBLAS workspace of 32 MiB for each of the
    two streams that GEMMs run on. Streams of its own for every engine would leave 64 MiB more with each."""
    worker_of(cache={"kv_cache_memory": "1GiB"}).close()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        worker = worker_of(cache={"kv_cache_memory": "4GiB"})
        assert torch.cuda.mem_get_info()[0] < free - (3 << 30)
        worker.close()
        assert torch.cuda.mem_get_info()[0] > free - (16 << 20)


def test_a_second_engine_takes_what_the_first_left() -> None:
    total = torch.cuda.mem_get_info()[1]
    first = worker_of(gpu_memory_utilization=0.3)
    second = worker_of(gpu_memory_utilization=0.5)
    assert total - torch.cuda.mem_get_info()[0] < 0.52 * total
    assert 0.5 < second.pool.num_blocks / first.pool.num_blocks < 1.0
    first.close()
    second.close()


HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_on_the_gpu_is_measured() -> None:
    size = 16 << 30
    alone = worker_of(gpu_memory_utilization=0.5)
    blocks, per_block = alone.pool.num_blocks, alone.pool.bytes_per_block
    alone.close()
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        beside = worker_of(gpu_memory_utilization=0.5)
        missing = (blocks - beside.pool.num_blocks) * per_block
        beside.close()
    finally:
        other.communicate(timeout=30)
    # What it asked for, and what a process has on a GPU by being there.
    assert size - (64 << 20) < missing < size + (2 << 30)


def test_the_engine_stays_within_its_share_of_the_gpu() -> None:
    total = torch.cuda.mem_get_info()[1]
    worker = worker_of(gpu_memory_utilization=0.4, max_num_batched_tokens=2048)
    try:
        assert 0.38 * total < total - torch.cuda.mem_get_info()[0] <= 0.4 * total
    finally:
        worker.close()


def test_a_pool_of_a_given_size_has_that_size() -> None:
    worker = worker_of(cache={"kv_cache_memory": "96MiB"})
    per_block = worker.pool.bytes_per_block
    assert worker.pool.num_blocks == (96 << 20) // per_block
    held = sum(part.numel() * part.element_size() for layer in worker._cache.layers for part in (layer.k, layer.v))
    assert held == (worker.pool.num_blocks + 1) * per_block
    worker.close()
    small = worker_of(cache={"kv_cache_memory": "96MiB"}, kv_cache_dtype="fp8")
    assert small.pool.num_blocks == 2 * ((96 << 20) // per_block)
    small.close()


def test_log_probabilities_that_do_not_fit_fail_their_request_alone() -> None:
    """The allocator itself runs out: it is held to what the engine has, and a little more."""
    from quire.sampling.params import SamplingParams
    from quire.scheduler.request import Request

    config = {**engines.QWEN3, "vocab_size": 151936}
    core = device_engine(config, dtype="bfloat16", budget=190, num_blocks=200)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    much = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=5)

    def requests() -> list[Any]:
        return [Request(f"r{i}", list(range(7 + i, 157 + i)), much if i == 1 else params, i, 0.0)
                for i in range(4)]  # fmt: skip

    def errors() -> list[str | None]:
        return [error for *_, error in engines.run(core, requests()).values()]

    assert errors() == [None] * 4
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (96 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        found = errors()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "ask for fewer" in (found.pop(1) or "") and found == [None] * 3
    assert errors() == [None] * 4
    core.close()


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
