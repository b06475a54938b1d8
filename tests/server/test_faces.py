"""What the faces must survive: requests that a fuzzer found, and calls that a model got wrong."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.server.conftest import Serve, Served

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WRONG_CALLS = {
    "a name that no tool could have": '{"name": "get weather!", "arguments": {}}',
    "half a surrogate pair as its name": '{"name": "\\ud800", "arguments": {}}',
    "half a surrogate pair in its arguments": '{"name": "weather", "arguments": {"city": "\\ud800"}}',
    "a text with half a surrogate pair as arguments": '{"name": "weather", "arguments": "\\ud800"}',
    "arguments that are no JSON": '{"name": "weather", "arguments": {\'city\': Oslo}}',
    "arguments that are no object": '{"name": "weather", "arguments": [1]}',
    "arguments that are cut off": '{"name": "weather", "arguments": {"city": "Os',
}


@pytest.fixture(scope="module", params=list(WRONG_CALLS.values()), ids=list(WRONG_CALLS))
def mistaken(serve: Serve, request: pytest.FixtureRequest) -> Served:
    """A model that gets its call wrong. Whoever runs tools tells it so, and the conversation must go on."""
    return serve(f"<tool_call>{request.param}</tool_call>")


def test_a_wrong_call_is_answered_in_chat_completions(mistaken: Served) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    found = mistaken.chat(tools=tools)
    assert found.status_code == 200, found.text
    said = found.json()["choices"][0]["message"]
    (call,) = said["tool_calls"]
    history = [{"role": "user", "content": "Hi"}, said, {"role": "tool", "tool_call_id": call["id"], "content": "?"}]
    again = mistaken.http.post("/v1/chat/completions", json={"messages": history, "tools": tools})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("stored", [True, False])
def test_a_wrong_call_is_answered_in_responses(mistaken: Served, stored: bool) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    with mistaken.openai.responses.stream(model="scripted", input="Hi", tools=tools, store=stored) as stream:
        first = stream.get_final_response()
    (call,) = first.output
    assert call.type == "function_call" and first.status == "completed"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "?"}
    more: Any = {"previous_response_id": first.id, "input": [result]} if stored else \
        {"input": [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True, exclude={"parsed_arguments"}),
                   result]}
    assert mistaken.openai.responses.create(model="scripted", tools=tools, **more).output


def test_a_wrong_call_is_answered_in_messages(mistaken: Served) -> None:
    client = anthropic.Anthropic(base_url=mistaken.address, api_key="none", max_retries=0, timeout=30.0)
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    asked: Any = {"role": "user", "content": "Hi"}
    first = client.messages.create(model="scripted", max_tokens=500, messages=[asked], tools=tools)
    (block,) = first.content
    assert block.type == "tool_use" and isinstance(block.input, dict)
    answered: Any = [asked, {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "?"}]}]
    assert client.messages.create(model="scripted", max_tokens=500, messages=answered, tools=tools).content


def test_a_template_sees_what_a_model_wrote_in_place_of_arguments(server: Served) -> None:
    text = "{'city': Oslo}"
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": text}}
    found = server.http.post("/v1/chat/completions", json={"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "?"}]})
    assert found.status_code == 200 and server.engine.tokenizer is not None
    assert json.dumps({"arguments": text}) in server.engine.tokenizer.decode(server.engine.asked[-1][0])


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}),
    ("/v1/messages/count_tokens", {"messages": [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}),
    ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}]}),
    ("/v1/responses", {"input": "x", "top_logprobs": False}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "namespace", "name": "n" * 100, "tools": [
        {"type": "function", "name": "f" * 100}]}]}),
])
def test_what_a_fuzzer_found_is_refused(server: Served, path: str, body: Any) -> None:
    found = server.http.post(path, json=body)
    assert found.status_code == 400 and found.json()["error"]["message"], found.text


def test_what_a_template_without_tools_asks_for_is_what_is_read(serve: Serve) -> None:
    """DeepSeek's template has marks of calls and knows no tools: the model is asked for Hermes' calls, and these are
    found."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    server = serve(call, template="{% for m in messages %}{{ m.content }}{% endfor %}{# <｜tool▁sep｜> #}")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    said = server.chat(tools=tools).json()["choices"][0]["message"]
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert server.engine.tokenizer is not None
    assert "<tool_call>" in server.engine.tokenizer.decode(server.engine.asked[-1][0])


def test_a_template_that_wants_arguments_as_text_gets_them_so(serve: Serve) -> None:
    """Functionary's puts them between texts; most others write them out as an object."""
    server = serve(template="{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
                            "{{ '>>>' + c.function.name + c.function.arguments }}{% endfor %}{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    found = server.http.post("/v1/chat/completions", json={"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"}]})
    assert found.status_code == 200, found.text
    assert server.engine.tokenizer is not None
    assert '>>>weather{"city": "Oslo"}rain' in server.engine.tokenizer.decode(server.engine.asked[-1][0])


def test_what_is_not_there_of_a_stored_response_is_told_as_a_path(server: Served) -> None:
    name = server.openai.responses.create(model="scripted", input="Hi").id
    found = server.http.get(f"/v1/responses/{name}/input_items")
    assert found.status_code == 404 and found.json()["error"]["code"] == "unknown_path", found.text
    assert server.http.get(f"/v1/responses/{name}").status_code == 200
