"""Tool calls are found in the formats of the families, however the text is cut, and what is no call stays text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.tool_parser import FORCED_FORMAT, FORMATS, ForcedCall, ToolParser, format_of_template

ARGS = {"city": "Zürich \"x\" {[", "days": [1, {"a": None}], "f": -1.5e3}
CALL = json.dumps({"name": "weather", "arguments": ARGS}, ensure_ascii=False)
LLAMA = json.dumps({"name": "weather", "parameters": ARGS})
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.", [("weather", ARGS)]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n", "",
     [("weather", ARGS), ("weather", ARGS)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call>', "", [("weather", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("weather", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": null}</tool_call>', "", [("weather", {})]),
    ("hermes", "no call <tool_ca", "no call <tool_ca", []),
    ("hermes", "a < b and  c\n", "a < b and  c\n", []),
    ("hermes", f"<tool_call>{CALL}", "", [("weather", ARGS)]),
    ("llama3", LLAMA, "", [("weather", ARGS)]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("weather", ARGS), ("weather", ARGS)]),
    ("llama3", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("llama3", "Plain {text}", "Plain {text}", []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", [("weather", ARGS), ("weather", ARGS)]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(ARGS)}", "", [("weather", ARGS)]),
    ("mistral", "Hello [there]", "Hello [there]", []),
    ("forced", f"[{CALL}]", "", [("weather", ARGS)]),
    ("hermes", '<tool_call>{"name": "weather"}</tool_call>\n Done.', "Done.", [("weather", {})]),
    ("llama3", '{"name": "weather"}', "", [("weather", {})]),
]


def parse(form: str, text: str, places: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolParser(FORCED_FORMAT if form == "forced" else FORMATS[form], {"weather"})
    content, names, arguments, ids = "", {}, {}, set()
    pieces = [parser.push(text[a:b]) for a, b in itertools.pairwise(places)]
    for shown, deltas in [*pieces, parser.finish()]:
        content += shown
        for delta in deltas:
            if delta.id is not None:
                assert delta.index == len(names) and delta.name
                names[delta.index] = delta.name
                ids.add(delta.id)
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    assert len(ids) == len(names) == parser.num_calls
    return content, [(names[place], json.loads(arguments[place])) for place in names]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=25))
def test_calls_are_found_however_the_text_is_cut(form: str, text: str, content: str, calls: list[Any],
                                                 cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert parse(form, text, places) == (content, calls)
    assert parse(form, text, list(range(len(text) + 1))) == (content, calls)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet='{}[]",:\\ab<tool_call>/|;1 ', max_size=60), form=st.sampled_from(sorted(FORMATS)))
def test_no_text_breaks_a_parser(text: str, form: str) -> None:
    parser = ToolParser(FORMATS[form], {"a"})
    for char in text:
        parser.push(char)
    parser.finish()


def test_arguments_are_handed_on_before_they_are_complete() -> None:
    parser = ToolParser(FORMATS["hermes"], {"weather"})
    _, deltas = parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Zü')
    assert [delta.arguments for delta in deltas] == ["", '{"city": "Zü']


def test_a_forced_call_is_its_arguments() -> None:
    call = ForcedCall("weather")
    _, deltas = call.push('{"city"')
    assert deltas[0].name == "weather" and deltas[0].id and deltas[1].arguments == '{"city"'
    assert call.finish() == ("", [])


def test_the_format_is_told_by_the_template() -> None:
    assert format_of_template("… <tool_call> …") == format_of_template(None) == "hermes"
    assert format_of_template("[AVAILABLE_TOOLS] [TOOL_CALLS]") == "mistral"
    assert format_of_template("<|python_tag|>") == "llama3"


def test_calls_beyond_the_most_are_left_out() -> None:
    parser = ToolParser(FORMATS["hermes"], {"weather"}, most=1)
    content, deltas = parser.push(f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>")
    assert content == "" and {delta.index for delta in deltas} == {0}
