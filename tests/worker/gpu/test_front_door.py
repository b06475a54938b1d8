"""The offline engine over the device worker on CPU tensors: swap, offload and the rest as through the plain worker."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine import assembly
from quire.executor.device import DeviceExecutor
from quire.kernels.cpu.ops import CpuOps
from quire.worker.gpu.worker import DeviceOptions, GpuWorker
from tests.worker.gpu.engines import GEMMA3, QWEN3

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)


def on_device(source: Any, config: Any) -> tuple[GpuWorker, DeviceExecutor]:
    """In the place of `build_worker`: what it does for a GPU, on CPU tensors."""
    from quire.models.build import dummy_weights

    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=config.scheduler.max_num_seqs or 16,
                            max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 512,
                            max_model_len=config.model.max_model_len)
    weights = dummy_weights(source.config, seed=config.model.seed)
    worker = GpuWorker(source.config, weights, config.cache, options, ops=CpuOps(num_threads=1))
    return worker, DeviceExecutor(worker)


def answers(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    rng = random.Random(4)
    shared = [rng.randrange(131) for _ in range(32)]
    prompts = [shared[: 8 * (i % 5)] + [rng.randrange(131) for _ in range(40)] for i in range(12)]
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", num_threads=1, max_model_len=200,
             **{"num_kv_blocks": 24, **options}) as llm:  # fmt: skip
        found = llm.generate(prompts, PARAMS, use_tqdm=False) + llm.generate(prompts[::-1], PARAMS, use_tqdm=False)
        llm.check()
        return [list(output.outputs[0].token_ids) for output in found], llm.metrics()


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["full", "windows"])
@pytest.mark.parametrize("options", [
    {"max_steps_in_flight": 2},
    {"swap_space": 0.01, "preemption_mode": "swap", "max_steps_in_flight": 2},
    {"swap_space": 0.01, "preemption_mode": "swap", "offload": True, "max_steps_in_flight": 3},
], ids=["recompute", "swap", "offload"])
def test_short_memory_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], options: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, _ = answers(tmp_path, num_kv_blocks=400)
    monkeypatch.setattr(assembly, "build_worker", on_device)
    found, metrics = answers(tmp_path, **options)
    assert found == plain
    assert metrics["preemptions"] > 0
