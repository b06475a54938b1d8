"""Clients that send too much, speak old or broken HTTP, or add up chunks strictly get an answer they can read."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from typing import Any

import openai
import pytest

from quire.server.openai_api.chat import ChatAnswer
from quire.server.service import Service
from tests.server.conftest import Serve, Served, events

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]


def _raw(server: Served, data: bytes) -> bytes:
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(data)
        found = b""
        while piece := client.recv(65536):
            found += piece
    return found


def test_a_client_that_sends_too_much_and_closes_reads_why(serve: Serve) -> None:
    server = serve(max_body_size="512KiB")
    host = server.address.removeprefix("http://")
    for size in (600_000, 4_000_000):
        client = http.client.HTTPConnection(host, timeout=10)
        client.request("POST", "/v1/completions", b" " * size, {"Content-Type": "application/json",
                                                                "Connection": "close"})
        answer = client.getresponse()
        assert answer.status == 413 and json.load(answer)["error"]["code"] == "body_too_large"
    huge = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n")
    assert _raw(server, huge).startswith(b"HTTP/1.1 413 ")  # nobody waits for that


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server: Served) -> None:
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer, _, stream = _raw(server, head + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answer
    pieces = stream.decode().split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    text = "".join(json.loads(piece.removeprefix("data: "))["choices"][0]["text"] for piece in pieces[:-2])
    assert text == "Hello, world!"
    whole = _raw(server, b"GET /health HTTP/1.0\r\n\r\n")
    assert whole.endswith(b'{"status":"ok"}') and b"content-length: 15" in whole


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])
def test_what_is_no_http_is_refused_in_the_error_shape(server: Served, data: bytes) -> None:
    head, _, body = _raw(server, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("tokens_at_once", [1, 7, 1000])
def test_the_client_s_stream_helper_adds_calls_up(serve: Serve, tokens_at_once: int) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
    server = serve(text * 2, tokens_at_once=tokens_at_once)
    with server.openai.chat.completions.stream(model="scripted", messages=CHAT, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("weather", '{"city": "Rom"}')] * 2
    for chunk in events(server.chat(tools=[TOOL], stream=True)):
        places = [call["index"] for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        assert len(set(places)) == len(places)  # clients that add up by hand expect each once


@pytest.mark.parametrize("text", ["<tool", '<tool_call>\n{"na', '<tool_call>\n{"name": "wea'])
def test_a_required_call_that_is_cut_off_is_no_content(serve: Serve, text: str) -> None:
    server = serve(text)
    message = server.chat(tools=[TOOL], tool_choice="required").json()["choices"][0]["message"]
    assert not message["content"] and "tool_calls" not in message
    chunks = events(server.chat(tools=[TOOL], tool_choice="required", stream=True))
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


def test_fields_without_effect_are_accepted_on_both_routes(server: Served) -> None:
    fields = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "fast", "safety_identifier": "x",
              "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}}
    assert server.complete(**fields).status_code == server.chat(**fields).status_code == 200


def test_every_field_of_the_openai_client_is_known_or_refused_on_purpose() -> None:
    from openai.types import completion_create_params as text
    from openai.types.chat import completion_create_params as chat

    from quire.server.openai_api.chat_protocol import ChatBody
    from quire.server.openai_api.protocol import CompletionBody

    for module, body, refused in ((chat, ChatBody, {"moderation"}), (text, CompletionBody, set())):
        names = set(module.CompletionCreateParamsBase.__annotations__) | {"stream"}  # type: ignore[attr-defined]
        assert names - set(body.model_fields) <= refused


def test_a_top_p_of_0_is_the_likeliest_token_alone(server: Served) -> None:
    assert server.chat(top_p=0).status_code == 200
    assert (server.params().top_p, server.params().top_k) == (1.0, 1)


@pytest.mark.parametrize(("fields", "start"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}},
     "response_format has type"),
    ({"guided_regex": "(["}, "guided_regex has"), ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
    ({"tools": []}, "tools is empty"),
])
def test_complaints_speak_of_what_the_client_wrote(server: Served, fields: dict[str, Any], start: str) -> None:
    error = server.chat(**fields).json()["error"]
    assert error["message"].startswith(start) and error["param"] == start.split()[0].split(".")[0]


def test_a_prompt_far_beyond_the_context_is_refused_by_its_beginning(serve: Serve,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    server, sizes = serve(), []
    encode = Service.encode

    async def noted(self: Service, text: str, add_special_tokens: bool = True, tenant: str | None = None) -> list[int]:
        sizes.append(len(text))
        return await encode(self, text, add_special_tokens, tenant)

    monkeypatch.setattr(Service, "encode", noted)
    for answer in (server.complete("a" * 3_000_000), server.chat("a" * 3_000_000)):
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded" and "more than 3270" in error["message"]
    assert sizes == [8 * 4096] * 2
    assert server.complete("a" * 5000).json()["error"]["message"].count("5000") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_many_logprobs_is_put_together_beside_the_other_streams(
        serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    server, loops = serve("x" * 1500, tokens_at_once=1500), []
    name = "events" if stream else "whole"
    made = getattr(ChatAnswer, name)

    def noted(self: ChatAnswer, *given: Any) -> Any:
        loops.append(asyncio._get_running_loop())
        return made(self, *given)

    monkeypatch.setattr(ChatAnswer, name, noted)
    for number, apart in ((1, False), (2, True)):
        answer = server.chat(logprobs=True, top_logprobs=2, max_tokens=number * 700, stream=stream)
        assert answer.text.count('"top_logprobs"') == number * 700
        assert (loops[-1] is None) is apart


def test_the_schema_of_a_tool_s_arguments_is_one_of_an_object(server: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    for choice in ("auto", "none", "required"):
        error = server.chat(tools=[TOOL, tool], tool_choice=choice).json()["error"]
        assert error["param"] == "tools[1].function.parameters" and "'array'" in error["message"]


def test_an_echo_of_token_ids_shows_special_tokens_as_its_offsets_count_them(server: Served) -> None:
    special = server.engine.tokenizer.encode("<s>Hi", add_special_tokens=False)  # type: ignore[union-attr]
    choice = server.complete(special, echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "<s>HiH" and choice["logprobs"]["text_offset"] == [0, 3, 4, 5]


def test_the_openai_client_retries_a_full_queue_by_itself(serve: Serve) -> None:
    """Retry-After is one that it understands."""
    from quire.errors import QueueFullError

    server = serve()
    server.engine.refuses = QueueFullError("full", 1.0)
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=1, timeout=30.0)
    began = time.monotonic()
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="scripted", prompt="Hi")
    assert time.monotonic() - began > 0.9
