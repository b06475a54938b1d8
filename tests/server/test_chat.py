"""Chat completions: every field does what OpenAI says, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.sampling.params import BeamSearchParams
from tests.server.conftest import Serve, Served, events

TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QWEN = ("{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<s>{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
        "<s>assistant:")


def test_an_answer_has_openai_s_shape(server: Served) -> None:
    body = server.chat("Hi").json()
    assert body["object"] == "chat.completion" and body["model"] == "scripted" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                      "logprobs": None, "finish_reason": "stop"}
    prompt = len("<s>user:Hi</s><s>assistant:") - len("<s></s><s>") + 3
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 14, "total_tokens": prompt + 14,
                             "prompt_tokens_details": {"cached_tokens": prompt // 2}}


def test_a_stream_is_the_same_answer_in_pieces(server: Served) -> None:
    response = server.chat("Hi", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "Hello, world!"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(c["object"] == "chat.completion.chunk" and c["id"] == chunks[0]["id"] for c in chunks)
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 14
    assert "usage" not in events(server.chat("Hi", stream=True))[0]


def test_usage_in_each_chunk_counts_up_to_the_last(server: Served) -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True}
    for response in (server.chat("Hi", stream=True, stream_options=asked),
                     server.complete("x", stream=True, stream_options=asked)):
        counts = [chunk["usage"]["completion_tokens"] for chunk in events(response)]
        assert counts == sorted(counts) and len(set(counts)) > 3 and counts[-1] == counts[-2]


def test_fields_reach_the_engine(server: Served) -> None:
    server.chat("Hi", max_completion_tokens=5, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, n=2, seed=-1, stop=["z"],
                presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, logit_bias={"5": -100},
                logprobs=True, top_logprobs=3, min_tokens=2, stop_token_ids=[9], ignore_eos=True, bad_words=["no"],
                allowed_token_ids=[1, 2], skip_special_tokens=False, include_stop_str_in_output=True, best_of=3,
                priority=4, cache_salt="s", timeout=9)
    params, more = server.engine.asked[-1][1:]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (5, 0.5, 0.9, 7, 0.1)
    assert (params.n, params.best_of, params.seed, params.stop) == (2, 3, (1 << 64) - 1, ("z",))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert params.logit_bias == {5: -100.0} and params.logprobs == 3 and params.min_tokens == 2
    assert params.stop_token_ids == (9,) and params.ignore_eos and params.bad_words == ("no",)
    assert params.allowed_token_ids == (1, 2) and not params.skip_special_tokens
    assert params.include_stop_str_in_output
    assert (more["priority"], more["cache_salt"], more["timeout"], more["tenant"]) == (4, "s", 9.0, None)


def test_fields_without_effect_are_accepted(server: Served) -> None:
    answer = server.chat("Hi", user="me", metadata={"a": "b"}, store=True, service_tier="flex", safety_identifier="x",
                         prompt_cache_key="k", prediction={"type": "content", "content": "x"}, modalities=["text"],
                         verbosity="medium", audio=None, parallel_tool_calls=None, model="scripted")
    assert answer.status_code == 200, answer.text


def test_several_choices_and_logprobs(server: Served) -> None:
    body = server.chat("Hi", n=2, logprobs=True, top_logprobs=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    first = body["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "H" and first["bytes"] == [72] and first["logprob"] == -1.0
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, -1.0]
    assert body["usage"]["completion_tokens"] == 28
    chunks = events(server.chat("Hi", n=2, logprobs=True, top_logprobs=2, stream=True))
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello, world!"
        pieces = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert pieces == body["choices"][index]["logprobs"]["content"]


def test_messages_become_the_template_s_prompt(server: Served) -> None:
    body = {"messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"}]}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.tokenizer is not None
    shown = server.engine.tokenizer.decode(server.engine.asked[-1][0], skip_special_tokens=False)
    assert shown == ('<s>system:Be\nkind</s><s>user:Hi</s><s>assistant:<tool_call>\n{"name": "weather", "arguments": '
                     '{"city": "Oslo"}}\n</tool_call></s><s>user:<tool_response>\nrain\n</tool_response></s>'
                     "<s>assistant:")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_parsed_and_streamed(serve: Serve, stream: bool) -> None:
    server = serve(f"Well. {CALL}", template=QWEN)
    response = server.chat("Weather?", tools=TOOLS, stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)]
        deltas = [call for c in choices for call in c["delta"].get("tool_calls", [])]
        assert deltas[0]["id"] and deltas[0]["function"]["name"] == "weather" and deltas[0]["type"] == "function"
        assert len(deltas) > 3  # in pieces
        assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"city": "Oslo"}'
        assert "".join(c["delta"].get("content") or "" for c in choices) == "Well."
        assert choices[-1]["finish_reason"] == "tool_calls"
    else:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well."
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'} and call["type"] == "function"
    assert server.engine.tokenizer is not None
    assert '"name": "weather"' in server.engine.tokenizer.decode(server.engine.asked[-1][0])


def test_tools_are_shown_to_models_whose_template_knows_none(serve: Serve) -> None:
    server = serve(CALL)
    choice = server.chat("Weather?", tools=TOOLS).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather" and choice["message"]["content"] is None
    assert server.engine.tokenizer is not None
    assert '<tools>\n{"name": "weather"' in server.engine.tokenizer.decode(server.engine.asked[-1][0])


def test_tool_choice_none_hides_the_tools(serve: Serve) -> None:
    server = serve(CALL)
    choice = server.chat("Weather?", tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_reasoning_is_split_where_the_model_marks_it(serve: Serve) -> None:
    thinking = "{# </think> #}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    server = serve("<think>\nhm\n</think>\n\nYes.", template=thinking)
    message = server.chat("?").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    deltas = [chunk["choices"][0]["delta"] for chunk in events(server.chat("?", stream=True))]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    opened = serve("hm</think>Yes.", template=thinking + "<think>\n")
    message = opened.chat("?").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    assert serve("<think>x</think>y").chat("?").json()["choices"][0]["message"]["content"] == "<think>x</think>y"


def test_beam_search_is_an_extra(server: Served) -> None:
    body = server.chat("Hi", use_beam_search=True, n=2, beam_width=3, length_penalty=0.5, early_stopping="never",
                       max_tokens=4).json()
    assert server.params() == BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=0.5, early_stopping="never")
    assert len(body["choices"]) == 2


@pytest.mark.parametrize(("field", "value", "code"), [
    ("foo", 1, "unknown_parameter"), ("audio", {}, "unsupported_parameter"), ("functions", [], "unsupported_parameter"),
    ("modalities", ["audio"], "invalid_value"), ("verbosity", "high", "invalid_value"),
    ("reasoning_effort", "low", "unsupported_parameter"), ("n", 0, "invalid_value"), ("n", 17, None),
    ("n", "1", "invalid_value"), ("n", True, "invalid_value"), ("temperature", 3, "invalid_value"),
    ("top_logprobs", 2, None), ("stop", ["a"] * 17, None), ("stop", [""], None), ("tools", [], None),
    ("tool_choice", "required", None), ("beam_width", 2, None), ("best_of", 17, None),
    ("max_tokens", 0, None), ("stream_options", {"include_usage": True}, None), ("timeout", 0, "invalid_value"),
    ("logit_bias", {"a": 1}, "invalid_value"), ("logit_bias", {"5": 101}, "invalid_value"),
    ("chat_template", "{{ 1 }}", "unknown_parameter"), ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}, None),
    ("chat_template_kwargs", {"messages": []}, None), ("max_tokens", 100000, "context_length_exceeded"),
    ("web_search_options", {}, "unsupported_parameter"), ("logprobs", 3, "invalid_value"),
    ("response_format", {"type": "yaml"}, "unsupported_value"), ("seed", 1 << 64, "invalid_value"),
])
def test_what_cannot_be_is_refused_by_name(server: Served, field: str, value: Any, code: str | None) -> None:
    response = server.chat("Hi", **{field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    named = {"context_length_exceeded": "messages"}.get(code or "", field)
    assert error["type"] == "invalid_request_error" and named in (error["param"] or error["message"]), error
    assert error["message"] and error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("content", "kind"), [
    ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], "image_url"),
    ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "input_audio"),
    ([{"type": "file", "file": {"file_id": "x"}}], "file"),
])
def test_images_audio_and_files_are_refused_by_name(server: Served, content: Any, kind: str) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400 and kind in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages[0].content[0]"


def test_reasoning_effort_reaches_a_template_that_knows_it(serve: Serve) -> None:
    server = serve(template="{{ reasoning_effort }}:{{ messages[0].content }}")
    assert server.chat("Hi", reasoning_effort="low").status_code == 200
    assert server.engine.tokenizer is not None
    assert server.engine.tokenizer.decode(server.engine.asked[-1][0]) == "low:Hi"


def test_chunks_of_several_tokens_lose_nothing(serve: Serve) -> None:
    server = serve("Grüße, 世界! 🎉", tokens_at_once=5)
    chunks = events(server.chat("Hi", stream=True))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Grüße, 世界! 🎉"


def test_token_ids_are_given_where_asked_for(server: Served) -> None:
    choice = server.chat("Hi", return_token_ids=True).json()["choices"][0]
    assert len(choice["token_ids"]) == 14 and choice["prompt_token_ids"]
    chunks = events(server.chat("Hi", return_token_ids=True, stream=True))
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == choice["token_ids"]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == \
        [choice["prompt_token_ids"], *[None] * (len(chunks) - 1)]
    parts = events(server.complete("Hi", return_token_ids=True, stream=True))
    assert [len(c["choices"][0].get("prompt_token_ids", [])) for c in parts] == [2, *[0] * (len(parts) - 1)]


def test_json_survives_any_text(serve: Serve) -> None:
    text = 'quote " backslash \\ newline \n null \x00 end'
    server = serve(text)
    assert server.chat("Hi").json()["choices"][0]["message"]["content"] == text
    chunks = events(server.chat("Hi", stream=True))
    assert "".join(json.loads(json.dumps(c))["choices"][0]["delta"].get("content", "") for c in chunks) == text


def test_a_forced_call_has_the_shape_of_the_model_s_own(serve: Serve) -> None:
    server = serve(CALL, template=QWEN)
    named = {"type": "function", "function": {"name": "weather"}}
    choice = server.chat("Weather?", tools=TOOLS, tool_choice=named).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    shape = server.params().structured_outputs
    assert choice["finish_reason"] == "stop" and shape.kind == "structural_tag"
    assert json.loads(shape.structural_tag)["format"]["elements"][0] == {"type": "const_string", "value": "<tool_call>"}


def test_the_client_s_own_accumulator_reads_streams_with_calls_and_thoughts(serve: Serve) -> None:
    thinking = QWEN.replace("<s>assistant:", "{# </think> #}<s>assistant:")
    server = serve(f"<think>hm</think>Well. {CALL}{CALL}", template=thinking)
    tools: Any = TOOLS
    with server.openai.chat.completions.stream(model="scripted", messages=[{"role": "user", "content": "?"}],
                                               tools=tools, n=1) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "content.delta" in kinds and "tool_calls.function.arguments.delta" in kinds
    assert final.message.content == "Well." and final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert [call.function.arguments for call in final.message.tool_calls] == ['{"city": "Oslo"}'] * 2
    assert final.message.reasoning_content == "hm"  # type: ignore[attr-defined]


def test_a_prompt_may_be_given_as_token_ids(serve: Serve) -> None:
    server = serve(f"<think>hm</think>{CALL}", template="{# </think> #}" + QWEN)
    first = server.chat("Weather?", tools=TOOLS, return_token_ids=True).json()["choices"][0]
    ids = first["prompt_token_ids"]
    body = {"prompt_token_ids": ids, "tools": TOOLS, "return_token_ids": True}
    again = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert server.engine.asked[-1][0] == ids and again["token_ids"] == first["token_ids"]
    assert again["message"]["reasoning"] == again["message"]["reasoning_content"] == "hm"
    assert again["message"]["tool_calls"][0]["function"]["name"] == "weather"
    whole = server.http.post("/v1/completions", json={"prompt_token_ids": ids, "return_token_ids": True}).json()
    assert whole["choices"][0]["prompt_token_ids"] == ids
    both = {"prompt_token_ids": ids, "messages": [{"role": "user", "content": "x"}]}
    assert server.http.post("/v1/chat/completions", json=both).status_code == 400
    assert server.http.post("/v1/completions", json={"prompt_token_ids": ids, "prompt": "x"}).status_code == 400
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert server.http.post(path, json={"max_tokens": 5}).status_code == 400


def test_a_prompt_that_opens_the_thoughts_is_seen_in_its_tokens_too(serve: Serve) -> None:
    server = serve("hm</think>Yes.", template="{# </think> #}{{ messages[0].content }}<think>\n")
    ids = server.chat("?", return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    message = server.http.post("/v1/chat/completions", json={"prompt_token_ids": ids}).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Yes.")


def test_logprobs_cover_thoughts_and_calls_streamed_and_whole(serve: Serve) -> None:
    text = f"<think>hm</think>Well. {CALL}"
    server = serve(text, template="{# </think> #}" + QWEN, tokens_at_once=3)
    asked: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    whole = server.chat("Weather?", **asked).json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in whole) == text + "</s>"
    chunks = [chunk["choices"][0] for chunk in events(server.chat("Weather?", stream=True, **asked))]
    assert [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]] == whole


def test_usage_tells_the_tokens_of_thoughts(serve: Serve) -> None:
    template = "{# </think> #}{{ messages[0].content }}"
    server = serve("<think>\nhmm\n</think>\n\nYes.", template=template, tokens_at_once=4)
    usage = server.chat("?").json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nhmm\n</think>")}
    last = events(server.chat("?", stream=True, stream_options={"include_usage": True}))[-1]
    assert last["usage"] == usage


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}),
    ("/v1/chat/completions", {"prompt_token_ids": [5] * 5000}),
    ("/v1/completions", {"prompt": "x" * 5000}), ("/v1/completions", {"prompt_token_ids": [5] * 5000}),
    ("/v1/responses", {"input": "x" * 5000}), ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": "x" * 5000}]}),
])
def test_a_context_that_does_not_fit_is_refused_with_the_numbers_on_every_route(server: Served, path: str,
                                                                               body: Any) -> None:
    for given in (body, {**body, "stream": True}):
        found = server.http.post(path, json=given)
        assert found.status_code == 400
        assert "4096" in found.json()["error"]["message"] and "50" in found.json()["error"]["message"]
