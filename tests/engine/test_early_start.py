"""A batch of prompts that fills a step starts while the rest of it is still being added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError
from tests.worker.gpu.engines import QWEN3

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPTS = [[1 + (7 * i + j) % 120 for j in range(40)] for i in range(6)]


def engine(folder: Path, steps: int, **options: object) -> LLM:
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", num_threads=1,
               max_model_len=64, num_kv_blocks=64, max_num_batched_tokens=64, max_steps_in_flight=steps, **options)


def started_before_the_last_was_added(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts had been added whenever a step began; 0 from when the last one was."""
    added, found = [0], []
    queue, submit = llm._queue, llm._core._submit
    monkeypatch.setattr(llm, "_queue", lambda *a, **k: (queue(*a, **k), added.__setitem__(0, added[0] + 1))[0])
    monkeypatch.setattr(llm._core, "_submit", lambda plan: (found.append(added[0]), submit(plan))[1])
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [count for count in found if count < len(PROMPTS)]


def test_a_full_step_begins_while_prompts_are_added_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, 1) as plain:
        wanted = [list(output.outputs[0].token_ids) for output in plain.generate(PROMPTS, PARAMS, use_tqdm=False)]
        with monkeypatch.context() as patch:
            assert started_before_the_last_was_added(plain, patch) == []
    with engine(tmp_path, 2) as llm:
        got = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        with monkeypatch.context() as patch:
            # 64 tokens are there after two prompts, and again after four: two steps are in flight then.
            assert started_before_the_last_was_added(llm, patch) == [2, 4]
        llm.check()
    assert got == wanted


def test_order_is_kept_where_it_is_not_that_of_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, 2, scheduling_policy="priority") as llm:
        assert started_before_the_last_was_added(llm, monkeypatch) == []


def test_a_refused_prompt_takes_back_those_that_had_begun(tmp_path: Path) -> None:
    with engine(tmp_path, 2) as llm:
        with pytest.raises(InvalidRequestError, match="prompt 5"):
            llm.generate([*PROMPTS[:5], [10**6]], PARAMS, use_tqdm=False)
        answers = llm.generate(PROMPTS[:2], PARAMS, use_tqdm=False)
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [6, 6]
        llm.check()
        assert not llm.has_unfinished_requests()
