"""/v1/responses with the real openai client: items, tools, reasoning, schemas, events, stored turns, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from quire.server.responses_api.store import ResponseStore, StoredResponse
from tests.server.conftest import Serve, Served

TEMPLATE = (
    "{# <think> </think> <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<s>{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "<s>assistant:")
WEATHER: Any = {"type": "function", "name": "weather", "description": "of a city", "strict": True,
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinker(serve: Serve) -> Served:
    return serve(f"<think>\nhm\n</think>\n\nLet me see. {CALL}\n{CALL}", template=TEMPLATE)


def prompt(server: Served) -> str:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.decode(server.engine.asked[-1][0])


def events(server: Served, **body: Any) -> list[dict[str, Any]]:
    text = server.http.post("/v1/responses", json={"stream": True, **body}).text
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_text_is_answered(server: Served) -> None:
    found = server.openai.responses.create(model="scripted", input="Hi", instructions="Be kind.", max_output_tokens=50,
                                           temperature=0.5, top_p=0.9)
    assert found.output_text == "Hello, world!" and found.status == "completed" and found.id.startswith("resp-")
    assert prompt(server) == "system:Be kind.user:Hiassistant:"
    assert (server.params().max_tokens, server.params().temperature, server.params().top_p) == (50, 0.5, 0.9)
    assert found.usage is not None and found.usage.output_tokens == 14
    assert found.usage.input_tokens == len(server.engine.asked[-1][0])
    assert found.usage.input_tokens_details.cached_tokens == found.usage.input_tokens // 2


def test_reasoning_text_and_calls_are_items_in_their_order(thinker: Served) -> None:
    found = thinker.openai.responses.create(model="scripted", input="Weather?", tools=[WEATHER])
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    body = found.model_dump()
    assert body["output"][0]["content"][0]["text"] == "hm"
    assert body["output"][1]["content"][0]["text"] == "Let me see."
    assert body["output"][2]["name"] == "weather" and json.loads(body["output"][2]["arguments"]) == {"city": "Oslo"}
    assert body["output"][2]["call_id"] != body["output"][3]["call_id"]
    assert found.usage is not None
    assert found.usage.output_tokens_details.reasoning_tokens == len("<think>\nhm\n</think>")


def test_the_client_s_stream_builds_the_same_response(thinker: Served) -> None:
    whole = thinker.openai.responses.create(model="scripted", input="Weather?", tools=[WEATHER])
    with thinker.openai.responses.stream(model="scripted", input="Weather?", tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()

    def shown(found: Any) -> list[Any]:
        return [{key: value for key, value in item.model_dump().items()
                 if key not in ("id", "call_id", "parsed_arguments")} for item in found.output]

    assert final.status == "completed" and final.usage == whole.usage
    left, right = shown(final), shown(whole)
    for item in left + right:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    assert left == right


def test_events_come_in_the_documented_sequence(thinker: Served) -> None:
    found = events(thinker, input="Weather?", tools=[WEATHER], parallel_tool_calls=False)
    kinds: list[str] = []
    for event in found:
        if not kinds or kinds[-1] != event["type"]:
            kinds.append(event["type"])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    added, part, done = "response.output_item.added", "response.content_part", "response.output_item.done"
    assert kinds == [
        "response.created", "response.in_progress",
        added, f"{part}.added", "response.reasoning_text.delta", "response.reasoning_text.done", f"{part}.done", done,
        added, f"{part}.added", "response.output_text.delta", "response.output_text.done", f"{part}.done", done,
        added, "response.function_call_arguments.delta", "response.function_call_arguments.done", done,
        "response.completed"]
    deltas = "".join(event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta")
    assert json.loads(deltas) == {"city": "Oslo"}
    assert len([event for event in found if event["type"] == "response.output_item.added"]) == 3


def test_a_response_of_too_few_tokens_is_incomplete(server: Served) -> None:
    found = server.openai.responses.create(model="scripted", input="Hi", max_output_tokens=3)
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens" and found.output_text == "Hel"
    assert events(server, input="Hi", max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_items_become_turns_of_the_conversation(thinker: Served) -> None:
    given: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "A."}]},
        {"type": "message", "role": "developer", "content": "B.", "id": "msg_1"},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_2", "status": "completed",
         "content": [{"type": "output_text", "text": "I ask.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]}]
    thinker.openai.responses.create(model="scripted", input=given)
    assert prompt(thinker) == (
        "system:A.\n\nB.user:Weather?assistant:<think>hm</think>I ask."
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>tool:raintool:sunassistant:')


def test_the_output_can_be_given_back_as_input(thinker: Served) -> None:
    first = thinker.openai.responses.create(model="scripted", input="Weather?", tools=[WEATHER])
    back = [{"role": "user", "content": "Weather?"}, *[item.model_dump(exclude_none=True) for item in first.output],
            {"type": "function_call_output", "call_id": "x", "output": "rain"}]
    answer: Any = thinker.openai.responses.create(model="scripted", input=back, tools=[WEATHER])  # type: ignore
    assert answer.status == "completed" and "tool:rain" in prompt(thinker)


def test_a_stored_response_is_gone_on_from(server: Served) -> None:
    first = server.openai.responses.create(model="scripted", input="One", instructions="First.")
    second = server.openai.responses.create(model="scripted", input="Two", previous_response_id=first.id)
    assert prompt(server) == "user:Oneassistant:Hello, world!user:Twoassistant:"
    assert second.previous_response_id == first.id
    assert server.openai.responses.retrieve(second.id).output_text == "Hello, world!"
    streamed = events(server, input="Three", previous_response_id=second.id)[-1]["response"]["id"]
    server.openai.responses.create(model="scripted", input="Four", previous_response_id=streamed)
    assert prompt(server).count("Hello, world!") == 3
    server.openai.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.create(model="scripted", input="Two", previous_response_id=second.id)


def test_store_false_is_honoured(server: Served) -> None:
    found = server.openai.responses.create(model="scripted", input="One", store=False)
    assert found.store is False
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(found.id)


def test_a_response_belongs_to_its_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "key-of-one,key-of-two")
    server = serve(key="key-of-one")
    found = server.openai.responses.create(model="scripted", input="One")
    other = openai.OpenAI(base_url=f"{server.address}/v1", api_key="key-of-two", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(found.id)
    assert server.openai.responses.retrieve(found.id).id == found.id


def test_the_store_is_bounded() -> None:
    store = ResponseStore(most=3, most_bytes=100)
    for number in range(5):
        store.put(None, str(number), StoredResponse({}, [], 20))
    assert len(store) == 3 and store.num_bytes == 60
    store.put(None, "large", StoredResponse({}, [], 90))
    assert len(store) == 1 and store.num_bytes == 90
    store.put(None, "too large", StoredResponse({}, [], 101))
    assert len(store) == 0 and store.num_bytes == 0


class City(pydantic.BaseModel):
    name: str


def test_a_schema_reaches_the_engine(serve: Serve) -> None:
    server = serve('{"name": "Oslo"}')
    found = server.openai.responses.parse(model="scripted", input="A city", text_format=City)
    assert found.output_parsed == City(name="Oslo")
    assert server.params().structured_outputs.kind == "json"


def test_tools_of_a_namespace_keep_it(serve: Serve) -> None:
    server = serve('<tool_call>{"name": "home.lights", "arguments": {}}</tool_call>')
    tools: Any = [{"type": "namespace", "name": "home", "description": "x",
                   "tools": [{"type": "function", "name": "lights", "parameters": {"type": "object"}}]},
                  {"type": "web_search", "external_web_access": True}]
    body = server.http.post("/v1/responses", json={"input": "Light!", "tools": tools}).json()
    (call,) = body["output"]
    assert (call["namespace"], call["name"]) == ("home", "lights") and '"name": "home.lights"' in prompt(server)


@pytest.mark.parametrize(("field", "value"), [
    ("truncation", "auto"), ("background", True), ("conversation", "c"), ("top_logprobs", 2), ("nonsense", 1),
    ("include", ["message.output_text.logprobs"]), ("max_output_tokens", 0), ("tool_choice", "required"),
    ("input", [{"type": "item_reference", "id": "x"}]), ("input", []), ("tools", [{"type": "code_interpreter"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
])
def test_what_cannot_be_is_refused_by_name(server: Served, field: str, value: Any) -> None:
    found = server.http.post("/v1/responses", json={"input": "Hi", **{field: value}})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert field in error["message"] and error["type"] == "invalid_request_error"


def test_a_context_that_does_not_fit_is_refused_with_the_numbers(server: Served) -> None:
    for body in ({"input": "x" * 5000}, {"input": "x", "max_output_tokens": 5000}):
        error = server.http.post("/v1/responses", json=body).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
        assert "4096" in error["message"] and "50" in error["message"] and "messages" not in error["message"]


def test_a_failure_in_the_stream_is_an_event(serve: Serve) -> None:
    server = serve()
    server.engine.fails_after = (3, RuntimeError("boom"))
    last = events(server, input="Hi")[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert "boom" not in last["response"]["error"]["message"]


def test_fields_that_no_engine_can_act_on_are_accepted(server: Served) -> None:
    found = server.http.post("/v1/responses", json={
        "input": "Hi", "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "user": "me",
        "client_metadata": {"a": "b"}, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x",
        "reasoning": {"summary": "auto", "effort": "high"}, "text": {"verbosity": "low"}, "parallel_tool_calls": True,
        "tool_choice": "auto", "truncation": "disabled", "stream_options": {"include_obfuscation": False}})
    assert found.status_code == 200, found.text


def test_a_client_that_leaves_ends_its_request(serve: Serve) -> None:
    server = serve("x" * 500)
    server.engine.delay = 0.01
    with httpx.stream("POST", f"{server.address}/v1/responses", json={"input": "Hi", "stream": True}) as response:
        next(response.iter_lines())
    for _ in range(200):
        if server.engine.aborted:
            break
        server.http.get("/health")
    assert server.engine.aborted
