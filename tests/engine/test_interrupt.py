"""Ctrl-C in the middle of `generate` ends it between two steps, and the engine is good for the next call."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.checkpoints import make_checkpoint

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def llm(tmp_path: Any) -> Any:
    make_checkpoint(tmp_path, "qwen3")
    with LLM(str(tmp_path), max_model_len=64, num_kv_blocks=40, skip_tokenizer_init=True) as made:
        yield made


def interrupt_in_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1) -> list[int]:
    """Ctrl-C while this step runs; the number of steps that were begun."""
    steps, inner = [0], llm._core.executor.submit

    def submit(plan: Any) -> Any:
        steps[0] += 1
        if steps[0] == number:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return inner(plan)

    monkeypatch.setattr(llm._core.executor, "submit", submit)
    return steps


def test_the_first_is_honoured_after_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    wanted = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids
    steps = interrupt_in_step(llm, monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[1:]], params, use_tqdm=False)
    assert steps == [3] and signal.getsignal(signal.SIGINT) is before
    assert not llm.has_unfinished_requests()
    assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids == wanted
    llm.check()


def test_the_second_is_honoured_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt_in_step(llm, monkeypatch, 2, times=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is before
    llm.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert not llm.has_unfinished_requests()
    llm.check()


def test_a_stream_leaves_it_to_its_reader_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupt_in_step(llm, monkeypatch, 4)
    seen = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)):
            seen += 1
            assert signal.getsignal(signal.SIGINT) is before
    assert seen == 3 and not llm.has_unfinished_requests()
