"""The device worker's whole path on CPU tensors: same tokens as the plain worker, whatever the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.engine.assembly.device import resolve
from quire.errors import ConfigError
from quire.worker.gpu.options import DeviceOptions, supported
from quire.worker.gpu.worker import GpuWorker
from tests.worker.gpu.engines import GEMMA3, QWEN3, make_engine, run, workload


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_and_logprobs_are_those_of_the_plain_worker(config: dict[str, Any], depth: int) -> None:
    plain = run(make_engine(config, device=False), workload(0, 22))
    device = run(make_engine(config, device=True, depth=depth), workload(0, 22))
    assert all(error is None for *_, error in plain.values())
    assert device == plain


def test_preemption_and_recomputation_change_nothing() -> None:
    plain = run(make_engine(QWEN3, device=False), workload(3, 12))
    core = make_engine(QWEN3, device=True, depth=2, num_blocks=26)
    assert run(core, workload(3, 12)) == plain
    assert core.scheduler.stats.preemptions > 0


def test_a_row_with_infinite_logits_fails_alone() -> None:
    core = make_engine(QWEN3, device=True, depth=2)
    requests = workload(5, 4)
    worker: GpuWorker = core.executor._worker  # type: ignore[attr-defined]
    decoder = worker.decoder
    original = decoder.logits

    def poisoned(hidden: Any, ctx: Any = None, out: Any = None) -> Any:
        logits = original(hidden, ctx, out)
        rows = worker._runner.launches.buffers.rows if out is not None else None
        if rows is not None:
            for place in range(logits.shape[0]):
                if int(rows[place]) == 0:
                    logits[place, 7] = float("nan")
        return logits

    decoder.logits = poisoned  # type: ignore[method-assign]
    found = run(core, requests)
    failed = [error for *_, error in found.values() if error is not None]
    assert len(failed) == 1 and "not finite" in failed[0]


def test_a_gpu_before_hopper_is_spared_what_only_hopper_has() -> None:
    options = DeviceOptions(max_num_seqs=7)
    assert supported(options, (9, 0)) is options and supported(options, (10, 0)) is options
    older = supported(options, (8, 9))
    assert (older.launch_early, older.prompt_rows, older.max_num_seqs) == (False, False, 7)
    with pytest.raises(ConfigError, match=r"compute capability 7\.5.*need 8\.0"):
        supported(options, (7, 5))


@pytest.mark.parametrize("asked", [
    {"quantization": "fp8"}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "file"},
    {"quantization": "int8", "quantization_group_size": 64}])
def test_tensor_ranks_take_every_format_in_deterministic_mode(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.assembly.device.missing_for_gpu", lambda: None)
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        config = EngineConfig.create(model="m", device="auto", deterministic=True, **asked, **sizes)
        assert resolve(config).model.device == "cuda"


def test_rocm_is_refused_by_name_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"device 'cuda' cannot be used: .*ROCm"):
        resolve(EngineConfig.create(model="m", device="cuda"))
    assert resolve(EngineConfig.create(model="m", device="auto")).model.device == "cpu"


def test_fp8_keys_are_refused_on_a_gpu_that_has_no_such_type() -> None:
    options = DeviceOptions(kv_cache_dtype="fp8")
    assert supported(options, (8, 9)).kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*8\.0"):
        supported(options, (8, 0))
