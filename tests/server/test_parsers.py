"""Thoughts and tool calls are found in the formats of the families, however the text is cut or cut off."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.parsers.pieces import CallDelta, Content, Piece, Thought
from quire.server.parsers.registry import (
    CALL_FORMATS,
    FORMATS,
    THOUGHT_FORMATS,
    OutputFormat,
    call_format_of,
    thought_format_of,
)
from quire.server_config import ServerConfig

ARGS: dict[str, Any] = {"city": "Zürich \"x\" {[ </tool", "days": [1, {"a": None}], "f": -1.5e3}
SCHEMA = {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "array"}, "f": {"type": "number"}, "code": {"type": "string"}}}
TOOLS = {"weather": SCHEMA, "time": {"type": "object"}}
Found = tuple[str, str, list[tuple[str, str]]]
"""Thoughts, content, and calls with their arguments as text."""


def cut(text: str, places: list[int], **form: Any) -> list[Piece]:
    parser = OutputFormat(**{"tools": TOOLS, "thoughts": "none", **form}).parser()
    pieces = [piece for a, b in itertools.pairwise(places) for piece in parser.push(text[a:b])]
    return [*pieces, *parser.finish()]


def summary(pieces: list[Piece]) -> Found:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    ids = set()
    for piece in pieces:
        if isinstance(piece, CallDelta):
            if piece.id is not None:
                assert piece.index == len(names) and piece.name and piece.id not in ids
                names[piece.index] = piece.name
                ids.add(piece.id)
            arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return thoughts, content, [(names[place], arguments[place]) for place in names]


def whole(text: str, **form: Any) -> Found:
    return summary(cut(text, [0, len(text)], **form))


def written(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of the family writes them."""
    texts = [json.dumps(args, ensure_ascii=False) for _, args in calls]
    named = [(name, text) for (name, _), text in zip(calls, texts)]
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for name, text in named]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form == "llama3":
        return "<|python_tag|>" + "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in named)
    if form == "mistral":
        return f"[TOOL_CALLS][{', '.join(objects)}]"
    if form == "mistral_v11":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in named)
    if form == "granite":
        return f"<|tool_call|>[{', '.join(objects)}]"
    if form == "phi4":
        return f"<|tool_call|>[{', '.join(objects)}]<|/tool_call|>"
    if form == "deepseek_v3":
        each = "\n".join(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
                         for name, text in named)
        return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"
    if form == "deepseek_v31":
        each = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for name, text in named)
        return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"
    if form == "kimi_k2":
        each = "".join(f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
                       for place, (name, text) in enumerate(named))
        return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"
    if form == "harmony":
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
            for name, text in named)
    if form == "pythonic":
        return "<|python_start|>[" + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls
        ) + "]<|python_end|>"
    return _xml(form, calls)


def _xml(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    def plain(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    if form == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={name}>\n" + "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n"
                                                         for key, value in args.items())
            + "</function>\n</tool_call>" for name, args in calls)
    if form == "deepseek_v32":
        each = "\n".join(f'<｜DSML｜invoke name="{name}">\n' + "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{plain(value)}'
            "</｜DSML｜parameter>\n" for key, value in args.items()) + "</｜DSML｜invoke>" for name, args in calls)
        return f"<｜DSML｜function_calls>\n{each}\n</｜DSML｜function_calls>"
    assert form == "glm45"
    return "\n".join(
        f"<tool_call>{name}\n" + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
                                        for key, value in args.items()) + "</tool_call>" for name, args in calls)


CALLS: list[tuple[str, dict[str, Any]]] = [("weather", ARGS), ("time", {}), ("weather", {"city": ""})]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_family_s_calls_are_found_wherever_a_stream_is_cut(form: str) -> None:
    before = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" if form == "harmony" \
        else "Let me see.\n\n"
    text = before + written(form, CALLS)
    thoughts, content, calls = whole(text, calls=form)
    assert (thoughts, content) == ("", "Let me see.")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS
    for place in range(len(text) + 1):
        assert summary(cut(text, [0, place, len(text)], calls=form)) == (thoughts, content, calls), text[:place]
    assert summary(cut(text, list(range(len(text) + 1)), calls=form)) == (thoughts, content, calls)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_text_that_is_cut_off_anywhere_gives_the_beginning_of_its_calls(form: str) -> None:
    text = written(form, CALLS)
    _, _, complete = whole(text, calls=form)
    for place in range(len(text)):
        _, _, calls = whole(text[:place], calls=form)
        assert [name for name, _ in calls] == [name for name, _ in complete[:len(calls)]]
        for (_, part), (_, all_of_it) in zip(calls, complete):
            assert all_of_it.startswith(part), (text[:place], part)
        assert summary(cut(text[:place], list(range(place + 1)), calls=form))[2] == calls


def _values() -> Any:
    odd = st.text(alphabet='{}[]()<>"\'\\/|=:;, \nab1é世🎉', max_size=12)
    # The XML formats have no way to write their own closing tags, nor line breaks at the edges of a text.
    return odd.filter(lambda text: "</" not in text and text == text.strip("\n"))


@pytest.mark.parametrize("form", sorted(FORMATS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_braces_quotes_and_unicode_in_arguments_survive(form: str, data: Any) -> None:
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["weather", "time"]), st.dictionaries(
        st.sampled_from(["city", "code"]), _values(), max_size=2)), min_size=1, max_size=3))
    calls = [(name, args if name == "weather" else {}) for name, args in calls]
    text = written(form, calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    _, content, found = summary(cut(text, sorted({0, len(text), *cuts}), calls=form))
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_is_read_the_same_in_pieces_and_whole(data: Any) -> None:
    form = data.draw(st.sampled_from(sorted(FORMATS)))
    marks = [mark for mark in written(form, CALLS).replace("｜", "|").split() if "<" in mark or "[" in mark]
    parts = data.draw(st.lists(st.one_of(st.text(alphabet='{}[]",:\\ab<tool_call>/|;1 \n', max_size=12),
                                         st.sampled_from(["<tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "{",
                                                          "[", "<|channel|>", "<|message|>", "to=functions.a",
                                                          *marks[:6]])),
                               max_size=12))
    text = "".join(parts)
    thoughts = data.draw(st.sampled_from(["none", "think", "mistral", "granite", "harmony"]))
    opened = data.draw(st.booleans())
    fields = {"calls": form, "thoughts": thoughts, "opened": opened}
    assert summary(cut(text, list(range(len(text) + 1)), **fields)) == whole(text, **fields)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_long_arguments_take_no_longer_for_each_piece(form: str) -> None:
    """A quarter of a megabyte in small pieces: what looked at all of it for each would take minutes."""
    calls: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "{x 'y' (z)} " * 20_000})]
    text = written(form, calls)
    began = time.process_time()
    found = summary(cut(text, [*range(0, len(text), 4), len(text)], calls=form))[2]
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert time.process_time() - began < 20.0


CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call>', "", [("weather", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("weather", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": null}</tool_call>', "", [("weather", {})]),
    ("hermes", '<tool_call>{"name": "weather"}</tool_call>\n Done.', "Done.", [("weather", {})]),
    ("hermes", "no call <tool_ca", "no call <tool_ca", []),
    ("hermes", "a < b and  c\n", "a < b and  c\n", []),
    ("hermes", "the mark <tool_call> is text", "the mark <tool_call> is text", []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}}', "", [("weather", {})]),
    ("llama3", '{"name": "weather"}', "", [("weather", {})]),
    ("llama3", '{"name": "weather", "parameters": {"a": 1}}; {"name": "time", "parameters": {}}', "",
     [("weather", {"a": 1}), ("time", {})]),
    ("llama3", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("llama3", "Plain {text}", "Plain {text}", []),
    ("llama3", "[weather(city='Oslo')]", "", [("weather", {"city": "Oslo"})]),
    ("pythonic", '<|python_start|>{"name": "weather", "parameters": {"a": 1}}<|python_end|>', "",
     [("weather", {"a": 1})]),
    ("mistral", "Hello [there]", "Hello [there]", []),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("weather", {"a": 1})]),
    ("phi4", 'functools[{"name": "weather", "arguments": {"a": 1}}]', "", [("weather", {"a": 1})]),
    ("qwen3_coder", "<function=weather>\n<parameter=days>\n[1]\n</parameter>\n</function>", "",
     [("weather", {"days": [1]})]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=f>\nmany\n</parameter>\n</function>\n</tool_call>", "",
     [("weather", {"f": "many"})]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=code>\n  x = 1\n\n  y = 2\n</parameter>\n</function>\n"
     "</tool_call>", "", [("weather", {"code": "  x = 1\n\n  y = 2"})]),
    ("pythonic", "[weather(city='Oslo', days=[1, 2], f=true)]", "",
     [("weather", {"city": "Oslo", "days": [1, 2], "f": True})]),
    ("qwen3_coder", '<function=weather>{"city": "</function>"}</function>\n<function=time>{}</function>', "",
     [("weather", {"city": "</function>"}), ("time", {})]),
    ("deepseek_v32", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "",
     [("time", {})]),
    ("granite", '<|tool_call|>[{"name": "time", "name": "weather", "arguments": {}}]', "", [("time", {})]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
    ("harmony", "No channels here.", "No channels here.", []),
    ("kimi_k2", 2 * "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "",
     [("time", {}), ("time", {})]),
    ("kimi_k2", "<|tool_call_begin|>time<|tool_call_argument_begin|>{}<|tool_call_end|>", "", [("time", {})]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_what_models_also_write(form: str, text: str, content: str, calls: list[Any]) -> None:
    for places in ([0, len(text)], list(range(len(text) + 1))):
        _, said, found = summary(cut(text, places, calls=form))
        assert (said, [(name, json.loads(arguments)) for name, arguments in found]) == (content, calls)


THINKING = [
    ("think", False, "<think>\nhm, 2 < 3\n</think>\n\nYes.", "hm, 2 < 3", "Yes."),
    ("think", True, "hm\n\nwell\n</think>\n\nYes. </think>", "hm\n\nwell", "Yes. </think>"),
    ("think", False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    ("think", False, "<thin air", "", "<thin air"),
    ("think", False, "\n\n<think></think>x", "", "x"),
    ("think", False, "<think>never ends </thin", "never ends </thin", ""),
    ("think", False, "  plain", "", "  plain"),
    ("think", True, "", "", ""),
    ("think", True, "cut off\n", "cut off\n", ""),
    ("mistral", False, "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ("granite", False, "Here is my thought process: hm Here is my response: Yes.", " hm ", " Yes."),
    ("harmony", False, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "hm",
     "Yes."),
    ("harmony", False, "<|channel|>analysis<|message|>cut", "cut", ""),
    ("harmony", False, "<|channel|>analysis<|message|>hm<|end|><|start|>assis", "hm", ""),
]


@pytest.mark.parametrize(("form", "opened", "text", "thought", "answer"), THINKING)
def test_thoughts_are_told_from_answers(form: str, opened: bool, text: str, thought: str, answer: str) -> None:
    for places in ([0, len(text)], list(range(len(text) + 1))):
        found = summary(cut(text, places, calls=None, thoughts=form, opened=opened))
        assert found == (thought, answer, [])


def test_thoughts_content_and_calls_keep_their_order() -> None:
    text = "<think>hm</think>Well. " + written("hermes", CALLS[:1]) + " And then."
    pieces = cut(text, [0, len(text)], calls="hermes", thoughts="think")
    assert [type(piece) for piece in pieces] == [Thought, Content, CallDelta, Content]


def test_every_format_can_be_named() -> None:
    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(ServerConfig)}
    assert choices["tool_call_parser"] == ("auto", *CALL_FORMATS)
    assert set(choices["reasoning_parser"]) == {"auto", "none", *THOUGHT_FORMATS}


def test_arguments_are_handed_on_before_they_are_complete() -> None:
    parser = OutputFormat(calls="hermes", thoughts="none").parser()
    (piece,) = parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Zü')
    assert isinstance(piece, CallDelta) and piece.arguments == '{"city": "Zü'


def test_calls_beyond_the_most_are_left_out() -> None:
    _, content, calls = whole(written("hermes", CALLS), calls="hermes", most=1)
    assert content == "" and len(calls) == 1


def test_the_call_s_own_id_is_kept_where_a_template_wants_it_back() -> None:
    pieces = cut(written("kimi_k2", CALLS), [0, 10_000], calls="kimi_k2")
    ids = [piece.id for piece in pieces if isinstance(piece, CallDelta) and piece.id]
    assert ids == ["functions.weather:0", "functions.time:1", "functions.weather:2"]


@pytest.mark.parametrize(("template", "calls", "thoughts"), [
    (None, "hermes", "none"), ("… <tool_call> … </think>", "hermes", "think"),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", "none"), ("[TOOL_CALLS] [ARGS] [/THINK]", "mistral_v11", "mistral"),
    ("<|python_tag|>", "llama3", "none"), ('{"name": function name, "parameters": dictionary of', "llama3", "none"),
    ("<tool_call>\\n<function=", "qwen3_coder", "none"), ("<tool_call> <arg_key> </think>", "glm45", "think"),
    ("<｜tool▁sep｜> ```json", "deepseek_v3", "none"), ("<｜tool▁sep｜> </think>", "deepseek_v31", "think"),
    ("<｜DSML｜function_calls> </think>", "deepseek_v32", "think"),
    ("<|tool_calls_section_begin|>", "kimi_k2", "none"), ("<|channel|> <|message|>", "harmony", "harmony"),
    ("<|tool|> <|/tool|>", "phi4", "none"), ("<|start_of_role|> <|tool_call|>", "granite", "none"),
    ("[func_name1(params", "pythonic", "none"),
])
def test_formats_are_told_by_the_template(template: str | None, calls: str, thoughts: str) -> None:
    assert (call_format_of(template), thought_format_of(template)) == (calls, thoughts)


@pytest.mark.parametrize(("form", "text"), [
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=f>\n1e999\n</parameter>\n<parameter=days>\n"
                    '["\\ud800", -1e999]\n</parameter>\n</function>\n</tool_call>'),
    ("glm45", '<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>["\\ud800"]</arg_value>\n</tool_call>'),
    ("pythonic", '[weather(city="\\ud800")]'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"\\ud800\\"}"}</tool_call>'),
])
def test_arguments_are_json_that_utf_8_can_write(form: str, text: str) -> None:
    ((_, arguments),) = whole(text, calls=form)[2]
    arguments.encode("utf-8")
    assert "Infinity" not in arguments and json.loads(arguments)


def test_an_argument_that_says_it_is_json_is_json_where_the_schema_does_not_tell() -> None:
    text = _xml("deepseek_v32", [("time", {"zones": [1, {"a": True}], "offset": 7, "name": "7"})])
    ((_, arguments),) = whole(text, calls="deepseek_v32")[2]
    assert json.loads(arguments) == {"zones": [1, {"a": True}], "offset": 7, "name": "7"}
