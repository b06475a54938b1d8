"""Running out of memory fails the request that asked for too much, or the step, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.worker.gpu import runner as runner_module
from tests.worker.gpu.engines import QWEN3, make_engine, run

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


def requests() -> list[Request]:
    """A plain one, one with log-probabilities, one with top_k, one with log-probabilities of its prompt."""
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"temperature": 0.7, "top_k": 5}, {"prompt_logprobs": 1}]
    return [
        Request(f"r{i}", [i + 1, 5, 9, 20], SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **kind}), i, 0.0)
        for i, kind in enumerate(kinds)
    ]


def outcome(core: Any) -> dict[str, str | None]:
    return {name: error for name, (*_, error) in run(core, requests()).items()}


def test_too_large_a_draw_fails_the_request_that_wanted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(make_engine(QWEN3, device=True, depth=2), requests())
    original = runner_module.sample_special

    def full(logits: Any, rows: Any, table: Any) -> Any:
        if any(table.info(row.row).params.top_k == 5 for row in rows):
            raise FULL
        return original(logits, rows, table)

    monkeypatch.setattr(runner_module, "sample_special", full)
    found = run(make_engine(QWEN3, device=True, depth=2), requests())
    assert "top_k" in (found["r2"][3] or "") and "gpu_memory_utilization" in (found["r2"][3] or "")
    assert [found[name] == plain[name] for name in ("r0", "r1", "r3")] == [True] * 3


def test_too_many_prompt_log_probabilities_fail_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise FULL

    core = make_engine(QWEN3, device=True, depth=2)
    monkeypatch.setattr(runner_module, "token_logprobs", full)
    errors = outcome(core)
    assert "prompt_logprobs" in (errors.pop("r3") or "") and list(errors.values()) == [None] * 3


def test_a_step_that_ran_out_is_tried_again_and_then_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(make_engine(QWEN3, device=True), requests())
    for failures, lost in (({2}, False), ({2, 3}, True)):
        core = make_engine(QWEN3, device=True)
        runner: Any = core.executor._worker._runner  # type: ignore[attr-defined]
        launch, calls = runner.run, [0]

        def failing(plan: Any, calls: list[int] = calls, launch: Any = launch, failures: set[int] = failures) -> Any:
            calls[0] += 1
            if calls[0] in failures:
                raise FULL
            return launch(plan)

        runner.run = failing
        found = run(core, requests())
        if lost:
            assert all("max_num_batched_tokens" in (error or "") for *_, error in found.values())
            assert outcome(core) == {f"r{i}": None for i in range(4)}
        else:
            assert found == plain
