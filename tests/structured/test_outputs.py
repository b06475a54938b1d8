"""Whatever a random model would rather say, its output has the shape that was asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire import LLM, InvalidRequestError, RequestOutput, SamplingParams, StructuredOutputs
from quire.sampling.params import BeamSearchParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "日本"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "lat": {"type": ["boolean", "null"]}},
            "required": ["zip"],
        },
    },
    "required": ["name", "age", "tags", "home"],
}
REGEXES = [r"[a-z]{1,6}@[a-z]{1,6}\.(com|org)", r"\d{3}-\d{4}", r"(Grüße|日本|😀){1,3}!", r"a.{2}b\S", r"x{0,3}"]
TEMPERATURES = [0.0, 0.5, 1.0, 3.0]


def ask(llm: LLM, shape: StructuredOutputs, count: int = 12, **params: Any) -> list[RequestOutput]:
    """The same prompt with many seeds and temperatures."""
    wanted = [SamplingParams(**{"max_tokens": 900, "seed": seed, "temperature": TEMPERATURES[seed % 4],
                                "structured_outputs": shape, **params}) for seed in range(count)]
    return llm.generate(["The quick brown fox"] * count, wanted, use_tqdm=False)


def texts(outputs: list[RequestOutput]) -> list[str]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert all(one.finish_reason == "stop" for output in outputs for one in output.outputs)
    return [one.text for output in outputs for one in output.outputs]


def test_json_of_a_schema_is_json_of_that_schema(any_llm: LLM) -> None:
    for text in texts(ask(any_llm, StructuredOutputs(json=PERSON), count=16)):
        found = json.loads(text)
        assert list(found) == ["name", "age", "tags", "home"]
        assert 1 <= len(found["name"]) <= 6 and type(found["age"]) is int and 0 <= found["age"] <= 120
        assert 1 <= len(found["tags"]) <= 3 and set(found["tags"]) <= {"a", "ü", "日本"}
        assert re.fullmatch("[0-9]{5}", found["home"]["zip"]) and set(found["home"]) <= {"zip", "lat"}


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_matches_the_whole_output(any_llm: LLM, regex: str) -> None:
    for text in texts(ask(any_llm, StructuredOutputs(regex=regex))):
        assert re.fullmatch(regex, text), text


def test_a_choice_is_one_of_them_to_the_letter(any_llm: LLM) -> None:
    choices = ["yes", "yes, but", 'a "quote" \\ back', "zwei\nZeilen", "日本語 😀", "tab\tab", "[a-z]*"]
    found = texts(ask(any_llm, StructuredOutputs(choice=choices), count=24))
    assert set(found) <= set(choices) and len(set(found)) > 2


def test_a_json_object_is_one(llm: LLM) -> None:
    outputs = ask(llm, StructuredOutputs(json_object=True), count=16, max_tokens=120)
    whole = [one.text for output in outputs for one in output.outputs if one.finish_reason == "stop"]
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)
    assert all(output.outputs[0].text.startswith("{") for output in outputs)


def test_a_grammar_derives_the_output(llm: LLM) -> None:
    grammar = 'root ::= term (("+" | "-") term){0,3}\nterm ::= [1-9] [0-9]{0,2} | "(" root ")"'
    for output in ask(llm, StructuredOutputs(grammar=grammar), count=16, max_tokens=60):
        text = output.outputs[0].text
        assert re.fullmatch(r"[0-9()+\-]*", text)
        if output.outputs[0].finish_reason == "stop":
            assert text.count("(") == text.count(")") and re.search("[1-9]", text)


def test_recursive_schemas_and_references_hold(llm: LLM) -> None:
    schema = {"$defs": {"node": {"type": "object", "properties": {
        "v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["v", "next"]}}, "$ref": "#/$defs/node"}
    for output in ask(llm, StructuredOutputs(json=schema), count=12, max_tokens=150):
        if output.outputs[0].finish_reason == "stop":
            node = json.loads(output.outputs[0].text)
            while node is not None:
                assert set(node) == {"v", "next"} and isinstance(node["v"], bool)
                node = node["next"]


def test_chat_and_stream_hold_the_shape_too(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=3, structured_outputs={"choice": ["left", "right"]})
    pieces = [output.outputs[0].text_delta for output in llm.stream("Which way?", params)]
    assert "".join(pieces) in ("left", "right")
    prompt = {"prompt": "Which way?", "add_special_tokens": False}
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text in ("left", "right")


def test_max_tokens_cuts_an_output_that_could_still_become_whole(llm: LLM) -> None:
    outputs = ask(llm, StructuredOutputs(regex="(ab){20}"), max_tokens=7)
    for output in outputs:
        assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 7
        assert ("ab" * 20).startswith(output.outputs[0].text)


def test_each_of_n_sequences_goes_its_own_way(llm: LLM) -> None:
    shape = StructuredOutputs(json=PERSON)
    (output,) = llm.generate(["x"], SamplingParams(n=6, temperature=2.0, seed=5, max_tokens=600,
                                                   structured_outputs=shape), use_tqdm=False)
    found = [json.loads(one.text) for one in output.outputs]
    assert len({one.text for one in output.outputs}) > 1 and all(set(one) >= {"name"} for one in found)


def test_unconstrained_rows_in_the_batch_are_as_if_alone(llm: LLM) -> None:
    free = SamplingParams(max_tokens=20, seed=9, temperature=1.0, logprobs=2)
    bound = SamplingParams(max_tokens=60, seed=9, logprobs=2, structured_outputs={"regex": "[0-9]{4,9}"})
    alone = llm.generate(["abc"], free, use_tqdm=False)[0].outputs[0]
    mixed = llm.generate(["abc", "abc", "abd"], [free, bound, bound], use_tqdm=False)
    assert mixed[0].outputs[0].token_ids == alone.token_ids and mixed[0].outputs[0].logprobs == alone.logprobs
    assert all(re.fullmatch("[0-9]{4,9}", output.outputs[0].text) for output in mixed[1:])


def test_the_end_comes_only_where_the_grammar_may_end(llm: LLM) -> None:
    """Even for a model that wants to end at once."""
    params = SamplingParams(max_tokens=50, temperature=0.0, logit_bias={2: 100.0},
                            structured_outputs={"regex": "ab{3,9}c?"})
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    assert output.outputs[0].text == "abbb" and output.outputs[0].finish_reason == "stop"


def test_without_an_end_token_it_ends_when_nothing_can_follow(llm: LLM) -> None:
    (output,) = llm.generate(["x"], SamplingParams(max_tokens=50, ignore_eos=True, seed=1,
                                                   structured_outputs={"regex": "ab{3}"}), use_tqdm=False)
    assert output.outputs[0].text == "abbb" and output.outputs[0].finish_reason == "stop"
    assert 2 not in output.outputs[0].token_ids


def test_a_stop_token_of_the_request_ends_it_where_the_grammar_may_end(llm: LLM) -> None:
    """<|im_start|> is no text, so it may come at the end and nowhere else."""
    (output,) = llm.generate(["x"], SamplingParams(
        max_tokens=50, temperature=0.0, ignore_eos=True, stop_token_ids=[3], logit_bias={3: 100.0},
        structured_outputs={"regex": "ab+"}), use_tqdm=False)
    assert output.outputs[0].text == "ab" and output.outputs[0].stop_reason == 3


def test_logprobs_are_among_the_allowed_tokens(llm: LLM) -> None:
    (output,) = llm.generate(["x"], SamplingParams(max_tokens=9, temperature=1.0, seed=2, logprobs=20,
                                                   structured_outputs={"regex": "[ab]{4}"}), use_tqdm=False)
    import math

    for position in output.outputs[0].logprobs or []:
        assert sum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1.0, abs=1e-4)
        assert all(set(entry.decoded_token or "") <= {"a", "b"} or token == 2 for token, entry in position.items())


@pytest.mark.parametrize("extra", [
    {"allowed_token_ids": [300, 301]},
    {"min_tokens": 30},
    {"bad_words": ["a"]},
])
def test_contradictions_end_that_request_alone(llm: LLM, extra: dict[str, Any]) -> None:
    good = SamplingParams(max_tokens=30, structured_outputs={"regex": "a{2}"})
    bad = SamplingParams(max_tokens=40, structured_outputs={"regex": "a{2}"}, **extra)
    outputs = llm.generate(["x", "y", "z"], [good, bad, good], use_tqdm=False)
    assert outputs[1].error is not None and "structured_outputs" in outputs[1].error
    assert [outputs[i].outputs[0].text for i in (0, 2)] == ["aa", "aa"]
    llm.check()


def test_a_grammar_that_allows_nothing_fails_alone(llm: LLM) -> None:
    (output,) = llm.generate(["x"], SamplingParams(structured_outputs={"grammar": "root ::= root"}), use_tqdm=False)
    assert output.error is not None and "no token" in output.error.replace("\n", " ")


@pytest.mark.parametrize("shape, field", [
    ({"grammar": 'root ::= "a" missing'}, "structured_outputs.grammar"),
    ({"grammar": 'start ::= "a"'}, "structured_outputs.grammar"),
    ({"regex": "*a"}, "structured_outputs.regex"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "structured_outputs.json"),
])
def test_what_only_the_compiler_finds_wrong_is_refused_by_name(llm: LLM, shape: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["x"], SamplingParams(structured_outputs=shape), use_tqdm=False)
    assert caught.value.field == field and field in str(caught.value)
    assert not llm.has_unfinished_requests()


def test_beam_search_refuses_a_shape_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        BeamSearchParams.from_dict({"beam_width": 2, "max_tokens": 5, "structured_outputs": {"regex": "a"}})


def test_an_engine_without_tokenizer_refuses(tiny_folder: Any) -> None:
    from tests.structured.tiny import tiny_llm

    refused = pytest.raises(InvalidRequestError, match="tokenizer")
    with tiny_llm(tiny_folder, skip_tokenizer_init=True) as blind, refused:
        blind.generate([[5, 6]], SamplingParams(structured_outputs={"regex": "a"}))
