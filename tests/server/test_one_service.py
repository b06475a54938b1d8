"""Chat, responses and messages are one service: a scripted model behind a real engine says the same through each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from quire import AsyncLLM
from tests.server.scripted import running

pytest.importorskip("xgrammar")
CITY = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "big": {"type": "boolean"}},
        "required": ["name", "big"], "additionalProperties": False}
CALL = '<tool_call>\n{"name": "city", "arguments": {"name": "Zürich {}", "big": true}}\n</tool_call>'
LINES = [
    {"say": "Hello."},
    {"after": "call", "say": f"<think>\nI {{ask}}.\n</think>\n\nLet me see. {CALL}\n{CALL}"},
    {"after": "right", "say": '<think>{"no": "schema here"</think>{"name": "Oslo", "big": false}'},
    {"after": "wrong", "say": '<think>hm</think>I would rather talk about it.'},
]
TOOL = {"name": "city", "description": "of a country", "parameters": CITY}


class Faces:
    """Asks the same through each API: (thoughts, content, calls), input tokens, output tokens."""

    def __init__(self, address: str) -> None:
        self._openai = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60.0)
        self._anthropic = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=60.0)

    def chat(self, text: str, tools: bool = False, schema: Any = None) -> Any:
        more: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]} if tools else {}
        if schema is not None:
            more["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        found = self._openai.chat.completions.create(model="m", messages=[{"role": "user", "content": text}],
                                                     max_completion_tokens=300, **more)
        message, usage = found.choices[0].message, found.usage
        calls = [(call.function.name, json.loads(call.function.arguments))  # type: ignore[union-attr]
                 for call in message.tool_calls or []]
        assert usage is not None
        thoughts = getattr(message, "reasoning", "")
        return (thoughts, message.content or "", calls), usage.prompt_tokens, usage.completion_tokens

    def responses(self, text: str, tools: bool = False, schema: Any = None) -> Any:
        more: dict[str, Any] = {"tools": [{"type": "function", **TOOL}]} if tools else {}
        if schema is not None:
            more["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        found = self._openai.responses.create(model="m", input=text, max_output_tokens=300, **more)
        items = [item.model_dump() for item in found.output]
        thoughts = "".join(item["content"][0]["text"] for item in items if item["type"] == "reasoning")
        calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
        assert found.usage is not None
        return (thoughts, found.output_text, calls), found.usage.input_tokens, found.usage.output_tokens

    def messages(self, text: str, tools: bool = False, schema: Any = None) -> Any:
        more: dict[str, Any] = {}
        if tools:
            more["tools"] = [{"name": "city", "description": TOOL["description"], "input_schema": CITY}]
        if schema is not None:
            more["extra_body"] = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        found = self._anthropic.messages.create(
            model="m", max_tokens=300, messages=[{"role": "user", "content": text}],
            thinking={"type": "enabled", "budget_tokens": 1024}, **more)
        blocks = [block.model_dump() for block in found.content]
        parts = {kind: "".join(block[kind] for block in blocks if block["type"] == kind)
                 for kind in ("thinking", "text")}
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        usage = found.usage
        size = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        return (parts["thinking"], parts["text"], calls), size, usage.output_tokens


@pytest.fixture(scope="module")
def faces(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    script = tmp_path_factory.mktemp("script") / "lines.jsonl"
    script.write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")

    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(tiny), executor="dummy", load_format="dummy", device="cpu",
                                    dummy_script=str(script))

    with running(start, served_model_name="m", reasoning_parser="think") as (address, _):
        yield Faces(address)


@pytest.mark.parametrize(("text", "options", "expected"), [
    ("Hi", {}, ("", "Hello.", [])),
    ("call it", {"tools": True},
     ("I {ask}.", "Let me see.", [("city", {"name": "Zürich {}", "big": True})] * 2)),
    ("right", {"schema": CITY}, ('{"no": "schema here"', '{"name": "Oslo", "big": false}', [])),
])
def test_the_same_is_said_through_every_face(faces: Faces, text: str, options: Any, expected: Any) -> None:
    found = [face(text, **options) for face in (faces.chat, faces.responses, faces.messages)]
    assert found[0][0] == expected
    assert found[0] == found[1] == found[2]  # the same tokens in, and the same out


def test_a_schema_holds_after_the_thoughts_on_every_face(faces: Faces) -> None:
    for face in (faces.chat, faces.responses, faces.messages):
        (thoughts, content, _), _, _ = face("wrong", schema=CITY)
        jsonschema.validate(json.loads(content), CITY)
        assert thoughts == "hm"
