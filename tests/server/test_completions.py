"""Completions: prompts of every kind, echo with log-probabilities, scores without output."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served, events


def test_a_completion_has_openai_s_shape(server: Served) -> None:
    body = server.complete("Say ", max_tokens=5).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9,
                             "prompt_tokens_details": {"cached_tokens": 2}}
    assert server.params().max_tokens == 5


def test_sixteen_tokens_are_the_default(server: Served) -> None:
    server.complete("x")
    assert server.params().max_tokens == 16


@pytest.mark.parametrize("prompt", ["ab", [65, 66], ["ab"], [[65, 66]]])
def test_a_prompt_may_be_text_or_tokens_or_a_list_of_one(server: Served, prompt: Any) -> None:
    body = server.complete(prompt).json()
    assert [choice["text"] for choice in body["choices"]] == ["Hello, world!"]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: Served) -> None:
    body = server.complete(["a", "bb"], n=2, echo=True).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "aHello, world!"), (1, "aHello, world!"), (2, "bbHello, world!"), (3, "bbHello, world!")]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 4 * 14
    chunks = events(server.complete(["a", "bb"], n=2, echo=True, stream=True))
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {c["index"]: c["text"] for c in body["choices"]}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_output(server: Served, stream: bool) -> None:
    if stream:
        pieces = [c["choices"][0]["logprobs"] for c in events(server.complete("ab", logprobs=2, echo=True, max_tokens=2,
                                                                             stream=True)) if c["choices"]]
        found = {key: [item for piece in pieces for item in piece[key]] for key in pieces[0]}
    else:
        found = server.complete("ab", logprobs=2, echo=True, max_tokens=2).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b", "H", "e"]
    assert found["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert found["text_offset"] == [0, 1, 2, 3]
    assert found["top_logprobs"][0] is None and found["top_logprobs"][2] == {"I": -0.5, "H": -1.0}
    assert server.params().prompt_logprobs == 2


def test_a_prompt_is_scored_without_output(server: Served) -> None:
    body = server.complete("abc", logprobs=0, echo=True, max_tokens=0).json()
    choice = body["choices"][0]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["top_logprobs"] is None
    assert body["usage"]["completion_tokens"] == 0


def test_a_stream_of_plain_text_joins_to_the_whole(server: Served) -> None:
    chunks = events(server.complete("x", stream=True, stream_options={"include_usage": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "Hello, world!"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["usage"]["total_tokens"] == 15
    plain = events(server.complete("x", stream=True))
    assert [c["choices"][0]["text"] for c in plain[:5]] == list("Hello")


@pytest.mark.parametrize(("field", "value", "named"), [
    ("suffix", "x", "suffix"), ("prompt", "", "prompt"), ("prompt", [], "prompt"), ("prompt", [[]], "prompt"),
    ("prompt", ["a", 1], "prompt"), ("prompt", [-1], "prompt"), ("prompt", {"a": 1}, "prompt"),
    ("prompt", ["a"] * 129, "prompt"), ("logprobs", 21, "logprobs"), ("logprobs", True, "logprobs"),
    ("best_of", 1, "best_of"), ("max_tokens", 0, "max_tokens"), ("prompt", "x" * 5000, "prompt"), ("foo", None, "foo"),
])
def test_what_cannot_be_is_refused_by_name(server: Served, field: str, value: Any, named: str) -> None:
    fields = {"prompt": "x", "n": 2, field: value}
    response = server.http.post("/v1/completions", json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert named in error["message"] and (error["param"] or "").startswith(named)


def test_an_empty_suffix_is_no_suffix(server: Served) -> None:
    assert server.complete("x", suffix="").status_code == 200
    assert server.complete("x", suffix=None).status_code == 200


def test_best_of_above_n_is_not_streamed(server: Served) -> None:
    assert server.complete("x", best_of=3, n=1).status_code == 200
    assert server.params().best_of == 3
    response = server.complete("x", best_of=3, n=1, stream=True)
    assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"


def test_another_model_is_not_found(server: Served) -> None:
    response = server.complete("x", model="gpt-4")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
