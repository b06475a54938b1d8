"""Prefill here, decode there: tokens and log-probabilities are, bit for bit, those of one engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from tests.checkpoints import FAMILY_NAMES, make_checkpoint
from tests.peers.pairs import SECRET, answers, pair

LENGTHS = (70, 33, 2, 48, 64, 9)
PROMPTS = [random.Random(i).choices(range(3, 97), k=length) for i, length in enumerate(LENGTHS)]
PROMPTS += [[*PROMPTS[0][:50], 5, 6, 7], PROMPTS[0]]
PARAMS = [
    SamplingParams(seed=1, max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=8, temperature=1.0, n=3, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=8, temperature=0.9, top_p=0.8, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=6, temperature=1.0, prompt_logprobs=1, logprobs=0, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=6, temperature=1.0, n=1, best_of=2, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=1, temperature=1.0, logit_bias={5: 3.0}, ignore_eos=True),
    SamplingParams(seed=7, max_tokens=9, temperature=1.0, min_tokens=4, stop_token_ids=list(range(40))),
    SamplingParams(seed=8, max_tokens=6, temperature=1.0, n=2, prompt_logprobs=0, ignore_eos=True),
]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 120, "max_model_len": 128}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, str] = {}

    def model(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_checkpoint(folder, family)
            made[family] = str(folder)
        return made[family]

    return model


def alone(model: str) -> list[Any]:
    with LLM(model, **OPTIONS) as llm:
        return answers(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_gives_the_bits_of_one_engine(models: Any, family: str) -> None:
    """Other block sizes on the two sides, and chunks that end anywhere."""
    model = models(family)
    with pair(model, {**OPTIONS, "block_size": 8, "max_num_batched_tokens": 21}, {**OPTIONS}) as (_, llm):
        assert answers(llm, PROMPTS, PARAMS) == alone(model)
        found = llm.metrics()
        assert found["kv_prompts_arrived"] >= 5 and found["kv_prompts_failed"] == 0
        # The last prompt is the first once more, and all but its last token is here: it is computed here.
        assert found["kv_tokens_received"] > 150


SIDES = {
    "equal blocks": ({}, {}),
    "blocks of one token": ({"block_size": 1, "num_kv_blocks": 400}, {"block_size": 3}),
    "no chunks": ({"enable_chunked_prefill": False}, {"block_size": 32}),
    "no prefix cache": ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
    "steps in flight": ({"max_steps_in_flight": 2, "max_num_batched_tokens": 16}, {"max_steps_in_flight": 2}),
    "swap on both sides": ({"num_kv_blocks": 9, "swap_space": 0.01, "preemption_mode": "swap"},
                           {"num_kv_blocks": 17, "swap_space": 0.01, "preemption_mode": "swap"}),
    "recompute on both sides": ({"num_kv_blocks": 9, "preemption_mode": "recompute"},
                                {"num_kv_blocks": 17, "preemption_mode": "recompute"}),
    "speculation": ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}),
}


@pytest.mark.parametrize("kind", SIDES)
def test_whatever_the_two_sides_are_like(models: Any, kind: str) -> None:
    """On a model with full attention and windows."""
    model = models("gemma3")
    prefill, decode = SIDES[kind]
    with pair(model, {**OPTIONS, "max_model_len": 100, **prefill}, {**OPTIONS, **decode}) as (_, llm):
        assert answers(llm, PROMPTS, PARAMS) == alone(model)
        found = llm.metrics()
        assert found["kv_prompts_arrived"] >= 4 and (kind != "speculation" or found["spec_draft_tokens"] > 0)


def test_beams_compute_the_last_token_of_the_prompt_themselves(models: Any) -> None:
    model = models("llama")
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    with LLM(model, **OPTIONS) as llm:
        expected = [[(each.token_ids, each.cumulative_logprob) for each in output.outputs]
                    for output in llm.beam_search(PROMPTS, params)]
    with pair(model, {**OPTIONS}, {**OPTIONS}) as (_, llm):
        found = [[(each.token_ids, each.cumulative_logprob) for each in output.outputs]
                 for output in llm.beam_search(PROMPTS, params)]
        assert found == expected and llm.metrics()["kv_prompts_arrived"] >= 5


def test_a_prefix_that_the_decode_side_has_is_not_sent(models: Any) -> None:
    prompt = PROMPTS[0]
    with pair(models("llama"), {**OPTIONS}, {**OPTIONS}) as (_, llm):
        first = llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0.0), use_tqdm=False)
        before = llm.metrics()["kv_tokens_received"]
        assert before == 70
        longer = [*prompt, *first[0].outputs[0].token_ids, *range(10, 40)]
        llm.generate([longer], SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.metrics()["kv_tokens_received"] - before == len(longer) - 64, "64 tokens are whole blocks here"


def test_short_prompts_and_requests_that_name_nobody_are_computed_here(models: Any) -> None:
    decode = {**OPTIONS, "kv_transfer": {"least_tokens": 40}}
    with pair(models("llama"), {**OPTIONS}, decode) as (_, llm):
        llm.generate([PROMPTS[1]], SamplingParams(max_tokens=2), use_tqdm=False)
        llm.add_request("here", PROMPTS[0], SamplingParams(max_tokens=2), prefill=[])
        while llm.has_unfinished_requests():
            llm.step()
        assert llm.metrics()["kv_prompts_asked"] == 0


@pytest.mark.parametrize("priority", [1 << 40, -(1 << 40)])
def test_a_priority_beyond_what_a_message_holds_does_not_cost_the_link(models: Any, priority: int) -> None:
    with pair(models("llama"), {**OPTIONS}, {**OPTIONS}) as (_, llm):
        llm.add_request("first", PROMPTS[0], SamplingParams(max_tokens=2, ignore_eos=True), priority=priority)
        llm.add_request("other", PROMPTS[3], SamplingParams(max_tokens=2, ignore_eos=True))
        while llm.has_unfinished_requests():
            llm.step()
        found = llm.metrics()
        assert found["kv_prompts_arrived"] == 2 and found["kv_links_lost"] == 0


def test_another_model_is_refused_by_name_and_the_prompt_is_computed_here(
        models: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama", seed=1)
    model = models("llama")
    with pair(str(tmp_path), {**OPTIONS}, {**OPTIONS}) as (other, _), \
            LLM(model, **OPTIONS, kv_transfer={"role": "decode", "peers": other.address, "transports": "tcp",
                                               "least_tokens": 1}) as llm:
        assert answers(llm, PROMPTS, PARAMS) == alone(model)
        assert llm.metrics()["kv_prompts_arrived"] == 0
    assert "another model, or other weights" in caplog.text
