"""Output of a shape over HTTP: schemas, expressions, choices, grammars and forced tool calls, by a model of noise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from quire import AsyncLLM
from tests.server.conftest import events
from tests.server.scripted import running

pytest.importorskip("xgrammar")
CITY = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "big": {"type": "boolean"}},
        "required": ["name", "big"], "additionalProperties": False}
DAY = {"type": "object", "properties": {"day": {"$ref": "#/$defs/day"}}, "required": ["day"],
       "additionalProperties": False, "$defs": {"day": {"enum": ["mon", "tue"]}}}
TOOLS = [{"type": "function", "function": {"name": "city", "parameters": CITY}},
         {"type": "function", "function": {"name": "day", "parameters": DAY}}]


@pytest.fixture(scope="module")
def client(tiny: Path) -> Iterator[httpx.Client]:
    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(tiny), load_format="dummy", num_threads=1, device="cpu")

    with (running(start, served_model_name="tiny") as (address, _),
          httpx.Client(base_url=address, timeout=60.0) as found):
        yield found


def chat(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 200, "seed": 3, **fields}
    return client.post("/v1/chat/completions", json=body)


def message(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = chat(client, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def check_city(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "big"} and len(found["name"]) <= 5 and isinstance(found["big"], bool)


def test_a_schema_holds(client: httpx.Client) -> None:
    choice = message(client, response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}})
    check_city(choice["message"]["content"])
    for extra in ({"guided_json": CITY}, {"structured_outputs": {"json": CITY}}, {"guided_json": json.dumps(CITY)}):
        check_city(message(client, **extra)["message"]["content"])


def test_the_client_parses_a_pydantic_model(client: httpx.Client) -> None:
    class City(pydantic.BaseModel):
        name: Literal["Oslo", "Rome"]
        big: bool

    asked = openai.OpenAI(base_url=str(client.base_url.join("/v1")), api_key="none", max_retries=0)
    found = asked.chat.completions.parse(model="tiny", messages=[{"role": "user", "content": "?"}],
                                         response_format=City, max_tokens=200)
    assert isinstance(found.choices[0].message.parsed, City)


@pytest.mark.parametrize(("extra", "pattern"), [
    ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
])
def test_other_shapes_hold(client: httpx.Client, extra: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, message(client, **extra)["message"]["content"])
    body = {"prompt": "?", "max_tokens": 60, **extra}
    found = client.post("/v1/completions", json=body).json()["choices"][0]
    assert re.fullmatch(pattern, found["text"]) and found["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called_with_right_arguments(client: httpx.Client, stream: bool) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "city"}}}
    if stream:
        deltas = [call for chunk in events(chat(client, stream=True, **asked))
                  for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        name, arguments = deltas[0]["function"]["name"], "".join(d["function"]["arguments"] for d in deltas)
        assert len(deltas) > 5
    else:
        (call,) = message(client, **asked)["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert name == "city"
    check_city(arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_required_makes_calls_of_functions_that_exist(client: httpx.Client, stream: bool) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(3):
        if stream:
            choices = [chunk["choices"][0] for chunk in events(chat(client, stream=True, **{**asked, "seed": seed}))]
            deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
            calls = [{"name": d["function"]["name"], "arguments": ""} for d in deltas if "name" in d["function"]]
            calls[0]["arguments"] = "".join(delta["function"]["arguments"] for delta in deltas)
            assert "".join(choice["delta"].get("content") or "" for choice in choices) == ""
            reason = choices[-1]["finish_reason"]
        else:
            choice = message(client, **{**asked, "seed": seed})
            calls, reason = [call["function"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]
            assert choice["message"]["content"] is None
        assert len(calls) == 1 and reason == "tool_calls"
        if calls[0]["name"] == "city":
            check_city(calls[0]["arguments"])
        else:
            assert json.loads(calls[0]["arguments"])["day"] in ("mon", "tue")


@pytest.mark.parametrize(("extra", "named"), [
    ({"guided_regex": "(["}, "guided_regex"), ({"guided_grammar": "nonsense"}, "guided_grammar"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"), ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"json_object": False}},
                                                         "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
     "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}],
      "tool_choice": "required"}, "tools"),
    ({"guided_choice": ["x"], "min_tokens": 9, "max_tokens": 12}, "guided_choice"),  # known on the way only
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
])
def test_shapes_that_cannot_be_are_refused_by_name(client: httpx.Client, extra: dict[str, Any], named: str) -> None:
    response = chat(client, **extra)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == named
    assert chat(client, max_tokens=1).status_code == 200
