"""/v1/messages with the real anthropic client: blocks, tools, thinking, events, errors in its form, counting."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.conftest import Serve, Served
from tests.server.test_responses import CALL, TEMPLATE, prompt

WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
HI: Any = [{"role": "user", "content": "Hi"}]


def client(server: Served, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": server.address, "api_key": "none", "max_retries": 0, "timeout": 30.0,
                                  **options})


@pytest.fixture(scope="module")
def thinker(serve: Serve) -> Served:
    return serve(f"<think>\nhm\n</think>\n\nLet me see. {CALL}\n{CALL}", template=TEMPLATE)


def test_a_message_is_answered(server: Served) -> None:
    found = client(server).messages.create(model="scripted", max_tokens=50, system="Be kind.", messages=HI,
                                           extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9})
    assert found.content[0].type == "text" and found.content[0].text == "Hello, world!"
    assert found.stop_reason == "end_turn" and found.role == "assistant" and found.id.startswith("msg-")
    assert prompt(server) == "system:Be kind.user:Hiassistant:"
    params = server.params()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (50, 0.5, 7, 0.9)
    size = len(server.engine.asked[-1][0])
    assert found.usage.cache_read_input_tokens == size // 2
    assert found.usage.input_tokens == size - size // 2 and found.usage.output_tokens == 14


def test_thinking_text_and_tool_use_are_blocks_in_their_order(thinker: Served) -> None:
    found = client(thinker).messages.create(model="scripted", max_tokens=500, messages=HI, tools=[WEATHER],
                                            thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert found.stop_reason == "tool_use"
    blocks = [block.model_dump() for block in found.content]
    assert blocks[0]["thinking"] == "hm" and blocks[1]["text"] == "Let me see."
    assert blocks[2]["name"] == "weather" and blocks[2]["input"] == {"city": "Oslo"}


def test_thoughts_come_only_where_they_are_asked_for(thinker: Served) -> None:
    for thinking in ({}, {"thinking": {"type": "disabled"}}):
        found = client(thinker).messages.create(model="scripted", max_tokens=500, messages=HI, **thinking)
        assert [block.type for block in found.content] == ["text"]


def test_the_client_s_stream_builds_the_same_message(thinker: Served) -> None:
    asked: dict[str, Any] = {"model": "scripted", "max_tokens": 500, "messages": HI, "tools": [WEATHER],
                             "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = client(thinker).messages.create(**asked)
    with client(thinker).messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
            "message_stop", "thinking", "text", "input_json"} <= kinds

    def shown(found: Any) -> list[Any]:
        return [{key: value for key, value in block.model_dump().items() if key not in ("id", "parsed_output")}
                for block in found.content]

    assert shown(final) == shown(whole) and final.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_events_come_in_the_documented_sequence(thinker: Served) -> None:
    response = thinker.http.post("/v1/messages?beta=true", json={
        "max_tokens": 500, "messages": HI, "tools": [WEATHER], "stream": True, "thinking": {"type": "adaptive"}})
    found = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line.startswith("data")]
    kinds: list[str] = []
    for event in found:
        name = event["type"] if event["type"] != "content_block_delta" else event["delta"]["type"]
        if not kinds or kinds[-1] != name:
            kinds.append(name)
    start, stop = "content_block_start", "content_block_stop"
    assert kinds == ["message_start", "ping", start, "thinking_delta", "signature_delta", stop, start, "text_delta",
                     stop, start, "input_json_delta", stop, start, "input_json_delta", stop, "message_delta",
                     "message_stop"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] > 0 and found[0]["message"]["usage"]["output_tokens"] == 0


def test_blocks_become_turns_of_the_conversation(thinker: Served) -> None:
    given: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "gone"}],
             "is_error": True},
            {"type": "text", "text": "And?"}]}]
    client(thinker).messages.create(model="scripted", max_tokens=500, messages=given, system=[
        {"type": "text", "text": "A."}, {"type": "text", "text": "B.", "cache_control": {"type": "ephemeral"}}])
    assert prompt(thinker) == (
        "system:A.\nB.user:Weather?assistant:<think>hm</think>I ask."
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        "tool:raintool:Error: goneuser:And?assistant:")


def test_a_stop_sequence_is_told(server: Served) -> None:
    found = client(server).messages.create(model="scripted", max_tokens=50, messages=HI, stop_sequences=["wor"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "wor")
    assert found.content[0].type == "text" and found.content[0].text == "Hello, "
    cut = client(server).messages.create(model="scripted", max_tokens=3, messages=HI)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_tokens_are_counted_as_a_request_would_have_them(thinker: Served) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": HI, "system": "Be kind.", "tools": [WEATHER]}
    count = client(thinker).messages.count_tokens(**asked)
    client(thinker).messages.create(max_tokens=100, **asked)
    assert count.input_tokens == len(thinker.engine.asked[-1][0])


@pytest.mark.parametrize(("choice", "mode"), [({"type": "any"}, "structural_tag"), ({"type": "auto"}, None),
                                              ({"type": "tool", "name": "weather"}, "structural_tag")])
def test_tool_choice_is_honoured(serve: Serve, choice: Any, mode: str | None) -> None:
    server = serve(CALL)
    found = client(server).messages.create(model="scripted", max_tokens=100, messages=HI, tools=[WEATHER],
                                           tool_choice=choice)
    assert found.content[0].type == "tool_use" and found.stop_reason == "tool_use"
    shape = server.params().structured_outputs
    assert (None if shape is None else shape.kind) == mode


def test_both_headers_carry_the_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "key-of-one")
    server = serve()
    for options in ({"api_key": "key-of-one"}, {"api_key": None, "auth_token": "key-of-one"}):
        assert client(server, **options).messages.create(model="scripted", max_tokens=9, messages=HI).id
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client(server, api_key="wrong").messages.create(model="scripted", max_tokens=9, messages=HI)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


@pytest.mark.parametrize(("field", "value"), [
    ("nonsense", 1), ("max_tokens", 0), ("container", "c"), ("mcp_servers", [{"url": "x"}]),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]), ("tool_choice", {"type": "any"}),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]), ("messages", []),
    ("messages", [*HI, {"role": "assistant", "content": "I"}]),
    ("stop_sequences", ["x"] * 30),
])
def test_what_cannot_be_is_refused_by_name_and_in_its_form(server: Served, field: str, value: Any) -> None:
    found = server.http.post("/v1/messages", json={"max_tokens": 9, "messages": HI, field: value})
    assert found.status_code == 400, found.text
    body = found.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]


def test_errors_are_those_that_the_client_knows(server: Served) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client(server).messages.create(model="claude", max_tokens=9, messages=HI)
    # Claude Code looks for both texts, and for the numbers in them: at one it makes the conversation shorter, at the
    # other it asks for less output.
    for size, most, words in ((5000, 9, r"prompt is too long: 50\d\d tokens > 4096 maximum"),
                              (100_000, 9, r"prompt is too long: more than \d+ tokens > 4096 maximum"),
                              (4000, 900, r"input length and `max_tokens` exceed context limit: 40\d\d \+ 900 > 4096")):
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError, match=words):
                client(server).messages.create(model="scripted", max_tokens=most, stream=stream, messages=[
                    {"role": "user", "content": "x" * size}])
    assert server.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}
                            ).json()["error"]["type"] == "invalid_request_error"


def test_a_failure_in_the_stream_is_an_event(serve: Serve) -> None:
    server = serve()
    server.engine.fails_after = (3, RuntimeError("boom"))
    text = server.http.post("/v1/messages", json={"max_tokens": 9, "messages": HI, "stream": True}).text
    last = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))
    assert last["type"] == "error" and "boom" not in text


def test_what_an_agent_sends_besides_is_accepted(server: Served) -> None:
    found = server.http.post("/v1/messages?beta=true", headers={"anthropic-beta": "a,b"}, json={
        "max_tokens": 9, "messages": [*HI, {"role": "system", "content": "Remember."}], "metadata": {"user_id": "x"},
        "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "output_config": {"effort": "high"},
        "service_tier": "auto"})
    assert found.status_code == 200, found.text
    assert server.http.head("/").status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404), ("GET", "/v1/messages/count_tokens", 405)])
def test_a_wrong_path_or_method_is_told_in_its_form(server: Served, method: str, path: str, status: int) -> None:
    found = httpx.request(method, server.address + path, timeout=30.0)
    assert found.status_code == status and found.json()["type"] == "error" and found.json()["error"]["message"]
    other = httpx.get(server.address + "/v1/nothing", timeout=30.0)
    assert other.status_code == 404 and "type" not in other.json() and other.json()["error"]["code"] == "unknown_path"
