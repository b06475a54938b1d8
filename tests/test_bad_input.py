"""Bad input fails alone, with an error of our own, and the engine goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, BeamSearchParams, InvalidRequestError, ModelLoadError, SamplingParams
from quire.errors import OutOfMemoryError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    "eos_token_id": 999,
}


def folder_with(tmp_path: Path, **changes: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(tmp_path)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, smollm2: str) -> Iterator[LLM]:
    """A model of 199 tokens behind a tokenizer of 49,152, with an end of sequence that it cannot draw."""
    from quire.models.loader.source import resolve_model

    folder = folder_with(tmp_path_factory.mktemp("tiny"))
    with LLM(folder, load_format="dummy", tokenizer=str(resolve_model(smollm2).path), device="cpu") as engine:
        yield engine


def still_serves(llm: LLM) -> bool:
    output = llm.generate([[3, 4]], SamplingParams(max_tokens=2), use_tqdm=False)[0]
    return output.error is None and len(output.outputs[0].token_ids) == 2


def test_text_that_tokenizes_beyond_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.generate(["The capital of France", [3]], use_tqdm=False)
    assert still_serves(llm)


def test_bad_words_and_eos_beyond_the_vocabulary_harm_nobody(llm: LLM) -> None:
    params = [SamplingParams(bad_words=["Paris"], min_tokens=3, max_tokens=4), SamplingParams(max_tokens=4)]
    outputs = llm.generate([[3], [4]], params, use_tqdm=False)
    assert [output.error for output in outputs] == [None, None]


@pytest.mark.parametrize("call", [
    lambda llm: llm.add_request("s", [1], cache_salt=5),
    lambda llm: llm.add_request("s", [1], tenant=5),
    lambda llm: llm.add_request("s", [1], arrival_time="x"),
    lambda llm: llm.add_request("s", [1], arrival_time=float("nan")),
    lambda llm: llm.generate([[1]], priority=3),
    lambda llm: llm.generate([[1]], tenant=5),
    lambda llm: llm.abort(5),
    lambda llm: llm.abort([[1]]),
    lambda llm: llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"tools": []}),
    lambda llm: llm.generate(5),
    lambda llm: llm.generate([[]]),
    lambda llm: llm.generate([[True, False]]),
    lambda llm: llm.generate([np.array([1, 2]).astype(float).tolist()]),
    lambda llm: llm.generate([[1]], "greedy"),
    lambda llm: llm.generate({"prompt": [1, 2]}),
    lambda llm: llm.generate({"prompt_token_ids": "\x01\x02"}),
])
def test_arguments_of_a_wrong_kind_raise_our_own_error(llm: LLM, call: Any) -> None:
    with pytest.raises(InvalidRequestError):
        call(llm)
    assert still_serves(llm)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == [] == llm.beam_search([], BeamSearchParams(2, 4)) == list(llm.stream([]))


def test_integers_of_numpy_are_integers(llm: LLM) -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.0), stop_token_ids=list(np.arange(7, 9)),
                            logit_bias={np.int32(5): np.float32(1.0)}, n=np.int8(2), seed=np.uint64(7))
    assert type(params.n) is int and type(params.temperature) is float and type(next(iter(params.logit_bias))) is int
    plain = SamplingParams(max_tokens=3, temperature=0.0, stop_token_ids=[7, 8], logit_bias={5: 1.0}, n=2, seed=7)
    assert params == plain
    found, expected = llm.generate([list(np.array([3, 4]))], params), llm.generate([[3, 4]], plain)
    assert found[0].outputs == expected[0].outputs and type(found[0].prompt_token_ids[0]) is int
    assert llm.generate(list(np.array([3, 4])), params)[0].outputs == expected[0].outputs


def test_ids_of_the_callers_own_do_not_collide_with_those_of_generate(llm: LLM) -> None:
    for number in range(200):
        llm.add_request(f"q{number}", [1], SamplingParams(max_tokens=1))
    assert still_serves(llm)
    while llm.has_unfinished_requests():
        llm.step()


def test_a_model_larger_than_memory_is_refused_before_it_is_built(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, hidden_size=1 << 20, intermediate_size=1 << 24, head_dim=1 << 6)
    with pytest.raises(OutOfMemoryError, match="smaller model"):
        LLM(folder, load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=1, device="cpu")


def test_an_end_of_sequence_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        LLM(folder_with(tmp_path, eos_token_id="x"), load_format="dummy", skip_tokenizer_init=True, device="cpu")
