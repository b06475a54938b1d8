"""An answer that is cut off, anywhere and in any family's format, is the same whole and streamed, on all three APIs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.messages_api.blocks import ContentBlocks
from quire.server.messages_api.tool_input import ToolInput
from quire.server.openai_api.chat import _delta, _message
from quire.server.parsers.pieces import CallDelta, Piece
from quire.server.parsers.registry import FORMATS, OutputFormat
from quire.server.responses_api.items import OutputItems
from tests.server.conftest import Serve
from tests.server.test_parsers import CALLS, TOOLS, written

Pushes = list[list[Piece]]


def pushes(form: str, text: str, places: list[int]) -> Pushes:
    """The pieces of each part of a text, and of its end; calls are numbered in place of ids."""
    parser = OutputFormat(calls=form, thoughts="harmony" if form == "harmony" else "think",
                          tools=TOOLS).parser()
    found = [parser.push(text[a:b]) for a, b in itertools.pairwise(places)] + [parser.finish()]
    for piece in itertools.chain.from_iterable(found):
        if isinstance(piece, CallDelta) and piece.id is not None:
            piece.id = f"call-{piece.index}"
    return found


def in_chat(found: Pushes) -> tuple[Any, Any]:
    """The message of a whole answer, and what a client adds up from the deltas of a stream."""
    streamed: dict[str, Any] = {"content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in map(_delta, found):
        for name in delta.keys() & {"content", "reasoning", "reasoning_content"}:
            streamed[name] = streamed.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"id": call.get("id"), "type": "function", "function": {
                "name": call["function"].get("name"), "arguments": ""}})
            known["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        streamed |= {"tool_calls": list(calls.values()), "content": streamed["content"] or None}
    return _message(list(itertools.chain.from_iterable(found))), streamed


def in_responses(found: Pushes) -> tuple[Any, Any]:
    whole, streaming = OutputItems({}), OutputItems({})
    whole.push(list(itertools.chain.from_iterable(found)))
    whole.end("incomplete")
    events = [event for each in found for event in streaming.push(each)] + streaming.end("incomplete")
    streamed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for place, item in enumerate(streamed):
        deltas = [event["delta"] for event in events if event.get("output_index") == place and "delta" in event]
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    return [{**item, "id": ""} for item in whole.items], [{**item, "id": ""} for item in streamed]


def in_messages(found: Pushes) -> tuple[Any, Any]:
    whole, streaming = ContentBlocks(True), ContentBlocks(True)
    whole.push(list(itertools.chain.from_iterable(found)))
    whole.end()
    events = [event for each in found for event in streaming.push(each)] + streaming.end()
    streamed: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            streamed.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1] += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
    for block, text in zip(streamed, texts):
        block["input" if block["type"] == "tool_use" else block["type"]] = \
            json.loads(text or "{}") if block["type"] == "tool_use" else text
    return whole.blocks(), streamed


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_whole_and_streamed_are_the_same_on_every_api_wherever_the_text_ends(form: str) -> None:
    before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if form == "harmony" \
        else "<think>hm</think>Well.\n"
    text = before + written(form, CALLS[:2])
    faces: list[Callable[[Pushes], tuple[Any, Any]]] = [in_chat, in_responses, in_messages]
    for end in range(len(text) + 1):
        one, many = (pushes(form, text[:end], places) for places in ([0, end], list(range(end + 1))))
        for face in faces:
            whole, streamed = face(one)[0], face(many)[1]
            assert streamed == whole, (face.__name__, text[:end])
    complete = [call for _, call in CALLS[:2]]
    assert [block["input"] for block in in_messages(one)[0] if block["type"] == "tool_use"] == complete


def test_pythonic_calls_that_are_cut_off_leave_no_text() -> None:
    text = "[time(), weather(city='Os"
    for end in range(len("[time(),"), len(text) + 1):
        message = in_chat(pushes("pythonic", text[:end], [0, end]))[0]
        assert message["content"] is None and len(message["tool_calls"]) == 1


@settings(max_examples=100, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8)
       .map(lambda value: value if isinstance(value, dict) else {"value": value}), st.data())
def test_the_input_of_a_tool_is_a_beginning_of_its_arguments(value: dict[str, Any], data: Any) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 2])))
    end = data.draw(st.integers(0, len(text)))
    cuts = sorted({0, end, *data.draw(st.lists(st.integers(0, end), max_size=5))})
    found = ToolInput()
    sent = "".join(found.push(text[a:b]) for a, b in itertools.pairwise(cuts)) + found.end()
    assert json.loads(sent or "{}") == found.value
    assert list(found.value.items()) == list(value.items())[:len(found.value)]
    assert end < len(text) or found.value == value


@pytest.mark.parametrize(("text", "value"), [
    ('{"a": 1, "b": "half', {"a": 1}), ('{"a": 1, b: 2, "c": 3}', {"a": 1}), ("{'a': 1}", {}), ("[1]", {}), ('"x"', {}),
    ('{"a": NaN}', {}), ('{"a": 1e999, "b": 1}', {}), ('{"a": "\\ud800"}', {"a": "\ufffd"}), ('{"a": 1,}', {"a": 1}),
    ('{"a": "two\nlines"}', {"a": "two\nlines"}), ('{"a": 1} and so on', {"a": 1}), ('{"a": ' + "[" * 9999, {}),
    ('{"a": ' + "[" * 300 + "]" * 300 + "}", {}), ('{"a": 1' + "0" * 5000 + "}", {}),
])
def test_what_is_no_json_ends_the_input(text: str, value: dict[str, Any]) -> None:
    for step in (1, len(text)):
        found = ToolInput()
        sent = "".join(found.push(text[place:place + step]) for place in range(0, len(text), step)) + found.end()
        assert found.value == value and json.loads(sent or "{}") == value


def test_a_real_client_gets_the_same_message_from_a_stream_that_is_cut_off(serve: Serve) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2]}}</tool_call>'
    server = serve(f"I see. {call}")
    client = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0, timeout=30.0)
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    hi: Any = [{"role": "user", "content": "Hi"}]
    seen = []
    for most in range(40, 112, 4):
        whole = client.messages.create(model="scripted", max_tokens=most, messages=hi, tools=tools)
        with client.messages.stream(model="scripted", max_tokens=most, messages=hi, tools=tools) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == whole.stop_reason
        assert [(each.type, getattr(each, "input", None), getattr(each, "text", None)) for each in final.content] == \
            [(each.type, getattr(each, "input", None), getattr(each, "text", None)) for each in whole.content]
        seen += [(each.input, whole.stop_reason) for each in whole.content if each.type == "tool_use"]
    assert ({"city": "Oslo"}, "max_tokens") in seen and ({"city": "Oslo", "days": [1, 2]}, "tool_use") in seen
    assert all(each.get("city", "Oslo") == "Oslo" for each, _ in seen)
