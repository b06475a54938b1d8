"""The offline engine over the device worker on CPU tensors: swap, offload and the rest as through the plain worker."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.assembly import engine as assembly
from quire.errors import ConfigError
from quire.executor.device import DeviceExecutor
from quire.ops.cpu import CpuOps
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.speculation import speculation_of
from quire.worker.gpu.worker import GpuWorker
from tests.worker.gpu.engines import GEMMA3, QWEN3

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)


def on_device(source: Any, config: Any, *_: Any) -> tuple[GpuWorker, DeviceExecutor]:
    """In the place of `build_worker`: what it does for a GPU, on CPU tensors."""
    from quire.models.build import dummy_weights

    seqs, asked = config.scheduler.max_num_seqs or 16, config.speculation.options
    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=seqs,
                            max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 512,
                            max_model_len=config.model.max_model_len,
                            draft_rows=0 if asked is None else asked.num_speculative_tokens * seqs)
    weights = dummy_weights(source.config, seed=config.model.seed)
    worker = GpuWorker(source.config, weights, config.cache, options, ops=CpuOps(num_threads=1),
                       speculation=speculation_of(config, source))
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


@pytest.mark.parametrize(("method", "adaptive"), [
    ("ngram", False), ("skip_layers", False), ("draft_model", False), ("draft_model", True)])
def test_drafts_change_no_token_while_blocks_are_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, adaptive: bool
) -> None:
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": adaptive}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    plain, _ = answers(tmp_path, num_kv_blocks=400)
    if method == "draft_model":
        (tmp_path / "draft").mkdir()
        (tmp_path / "draft" / "config.json").write_text(json.dumps(QWEN3))
        asked |= {"model": str(tmp_path / "draft"), "load_format": "dummy"}
    monkeypatch.setattr(assembly, "build_worker", on_device)
    found, metrics = answers(tmp_path, swap_space=0.01, preemption_mode="swap", max_steps_in_flight=2,
                             max_num_seqs=8, speculative_config=asked)
    assert found == plain
    assert metrics["preemptions"] > 0
    assert adaptive or metrics["spec_draft_tokens"] > 0


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**QWEN3, "vocab_size": 130}))
    monkeypatch.setattr(assembly, "build_worker", on_device)
    asked = {"method": "draft_model", "model": str(tmp_path / "draft"), "load_format": "dummy"}
    with pytest.raises(ConfigError, match="vocabulary of 130 tokens"):
        answers(tmp_path, speculative_config=asked)
