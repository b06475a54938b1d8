"""Running out of memory fails the request that asked for too much, or the step, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.worker.gpu import draws, prompt_logprobs
from tests.worker.gpu.engines import QWEN3, make_engine, run

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
SAID = [
    FULL,
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cuBLASLt answered with CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
]
"""However a library puts it."""


def requests() -> list[Request]:
    """A plain one, one with log-probabilities, one with top_k, one with log-probabilities of its prompt."""
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"temperature": 0.7, "top_k": 5}, {"prompt_logprobs": 1}]
    return [
        Request(f"r{i}", [i + 1, 5, 9, 20], SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **kind}), i, 0.0)
        for i, kind in enumerate(kinds)
    ]


def outcome(core: Any) -> dict[str, str | None]:
    return {name: error for name, (*_, error) in run(core, requests()).items()}


@pytest.mark.parametrize("full", SAID, ids=["torch", "cublas", "triton", "cublaslt", "driver"])
def test_too_large_a_draw_fails_the_request_that_wanted_it(
    monkeypatch: pytest.MonkeyPatch, full: RuntimeError
) -> None:
    plain = run(make_engine(QWEN3, device=True, depth=2), requests())
    original = draws.sample_special

    def greedy(logits: Any, rows: Any, table: Any, positions: Any) -> Any:
        if any(table.info(row.row).params.top_k == 5 for row in rows):
            raise full
        return original(logits, rows, table, positions)

    monkeypatch.setattr(draws, "sample_special", greedy)
    found = run(make_engine(QWEN3, device=True, depth=2), requests())
    assert "top_k" in (found["r2"][3] or "") and "gpu_memory_utilization" in (found["r2"][3] or "")
    assert [found[name] == plain[name] for name in ("r0", "r1", "r3")] == [True] * 3


def test_too_many_prompt_log_probabilities_fail_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise FULL

    core = make_engine(QWEN3, device=True, depth=2)
    monkeypatch.setattr(prompt_logprobs, "token_logprobs", full)
    errors = outcome(core)
    assert "prompt_logprobs" in (errors.pop("r3") or "") and list(errors.values()) == [None] * 3


@pytest.mark.parametrize("full", SAID, ids=["torch", "cublas", "triton", "cublaslt", "driver"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_ran_out_is_tried_again_and_then_fails_alone(full: RuntimeError, depth: int) -> None:
    plain = run(make_engine(QWEN3, device=True), requests())
    for failures, lost in (({2}, False), ({2, 3}, True)):
        core = make_engine(QWEN3, device=True, depth=depth)
        runner: Any = core.executor._worker._runner  # type: ignore[attr-defined]
        launch, calls = runner.run, [0]

        def failing(plan: Any, calls: list[int] = calls, launch: Any = launch, failures: set[int] = failures) -> Any:
            calls[0] += 1
            if calls[0] in failures:
                raise full
            return launch(plan)

        runner.run = failing
        found = run(core, requests())
        if lost:
            assert all("max_num_batched_tokens" in (error or "") for *_, error in found.values())
            assert outcome(core) == {f"r{i}": None for i in range(4)}
        else:
            assert found == plain


def test_an_error_that_is_not_about_memory_keeps_its_own_words() -> None:
    core = make_engine(QWEN3, device=True)
    runner: Any = core.executor._worker._runner  # type: ignore[attr-defined]
    calls = [0]

    def broken(plan: Any) -> Any:
        calls[0] += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner.run = broken
    errors = outcome(core)
    assert all("illegal memory access" in (error or "") and "lower" not in (error or "") for error in errors.values())
    assert calls[0] <= len(errors)


@pytest.mark.parametrize("full", SAID, ids=["torch", "cublas", "triton", "cublaslt", "driver"])
def test_running_out_while_the_engine_is_built_says_what_to_lower(
    monkeypatch: pytest.MonkeyPatch, full: RuntimeError
) -> None:
    from quire.errors import OutOfMemoryError
    from quire.worker.gpu import worker as worker_module

    def fail(*args: Any) -> Any:
        raise full

    monkeypatch.setattr(worker_module, "build_on_device", fail)
    with pytest.raises(OutOfMemoryError, match=r"gpu_memory_utilization.*max_num_batched_tokens"):
        make_engine(QWEN3, device=True)


def test_what_cublaslt_says_of_memory_is_known_as_such() -> None:
    from quire.kernels.cublas import _check
    from quire.worker.gpu.memory import ran_out

    for status, about_memory in ((3, True), (13, False)):
        with pytest.raises(RuntimeError) as raised:
            _check(status)
        assert ran_out(raised.value) == about_memory
