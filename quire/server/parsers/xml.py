"""Calls whose arguments stand one by one between tags: Qwen3-Coder's <parameter=…>, GLM-4.5's <arg_key>, and
DeepSeek V3.2's <｜DSML｜parameter …>."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.server.parsers import grammar as g
from quire.server.parsers.reader import Reader, Steps
from quire.server.parsers.typed import json_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
DSML = "｜DSML｜"
Argument = Callable[[Reader, Mapping[str, Any]], Steps[tuple[str, str] | None]]
"""Reads the next argument, its name and its JSON by the tool's schema; None where no whole one follows."""


def read_qwen_coder(reader: Reader) -> Steps[None]:
    """The outer tag is sometimes forgotten; what counts is <function=NAME>."""
    while (mark := (yield from reader.text_until(OPEN, "<function="))) is not None:
        yield from reader.skip_any()
        if mark == OPEN and not (yield from reader.skip("<function=")):
            reader.give_back()
            continue
        name = yield from reader.take_until(">")
        if not name or not name.strip():
            reader.give_back()
            continue
        yield from reader.skip_any()
        if (yield from reader.looks_at("{")):  # Functionary's: the arguments are one object
            reader.call(name.strip())
            yield from reader.json_arguments()
            yield from reader.skip_any()
        else:
            yield from _arguments(reader, name.strip(), _qwen_argument)
        yield from reader.skip("</function>")
        yield from reader.skip_any()
        yield from reader.skip(CLOSE)


def read_glm(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until(OPEN)):
        name = yield from _glm_name(reader)
        if not name:
            reader.give_back()
            continue
        yield from _arguments(reader, name, _glm_argument)
        yield from reader.skip(CLOSE)


def read_deepseek_v32(reader: Reader) -> Steps[None]:
    """V4 writes tool_calls around them, V3.2 function_calls."""
    while (yield from reader.text_until(*(f"<{DSML}{mark}" for mark in ("function_calls>", "tool_calls>", "invoke ")))):
        yield from reader.skip_any()
        yield from reader.skip(f"<{DSML}invoke ")
        head = yield from reader.take_until(">")
        name = _attribute(head, "name")
        if not name:
            reader.give_back()
            continue
        yield from _arguments(reader, name, _dsml_argument)
        yield from reader.skip(f"</{DSML}invoke>")
        yield from reader.skip_any()
        yield from reader.skip(f"</{DSML}function_calls>")
        yield from reader.skip(f"</{DSML}tool_calls>")


def _attribute(head: str | None, name: str) -> str:
    found = re.search(rf'\b{name}="([^"]*)"', head or "")
    return found[1].strip() if found else ""


def _arguments(reader: Reader, name: str, argument: Argument) -> Steps[None]:
    """A call with all its arguments, each handed on as soon as it is complete. What follows must be a closing tag:
    an object that was cut off stays open, so that nobody takes it for a whole one."""
    reader.call(name)
    before = "{"
    while (found := (yield from argument(reader, reader.tools.get(name, {})))) is not None:
        reader.arguments(f"{before}{json.dumps(found[0], ensure_ascii=False)}: {found[1]}")
        before = ", "
    closed = yield from reader.looks_at("</")
    if closed:
        reader.arguments("{}" if before == "{" else "}")


def _qwen_argument(reader: Reader, schema: Mapping[str, Any]) -> Steps[tuple[str, str] | None]:
    yield from reader.skip_any()
    if not (yield from reader.skip("<parameter=")):
        return None
    key = yield from reader.take_until(">")
    value = None if key is None else (yield from reader.take_until("</parameter>"))
    if key is None or value is None:
        reader.drop_rest()  # half an argument is none
        return None
    # One line break on either side belongs to the tags.
    key = key.strip()
    return key, json_of(value.removeprefix("\n").removesuffix("\n"), key, schema)


def _glm_argument(reader: Reader, schema: Mapping[str, Any]) -> Steps[tuple[str, str] | None]:
    yield from reader.skip_any()
    if not (yield from reader.skip("<arg_key>")):
        return None
    key = yield from reader.take_until("</arg_key>")
    between = None if key is None else (yield from reader.take_until("<arg_value>"))
    value = None if between is None else (yield from reader.take_until("</arg_value>"))
    if key is None or value is None:
        reader.drop_rest()
        return None
    return key.strip(), json_of(value, key.strip(), schema)


def _dsml_argument(reader: Reader, schema: Mapping[str, Any]) -> Steps[tuple[str, str] | None]:
    """It says of itself whether it is a text or JSON."""
    yield from reader.skip_any()
    if not (yield from reader.skip(f"<{DSML}parameter ")):
        return None
    head = yield from reader.take_until(">")
    value = None if head is None else (yield from reader.take_until(f"</{DSML}parameter>"))
    key = _attribute(head, "name")
    if value is None or not key:
        reader.drop_rest()
        return None
    if _attribute(head, "string") == "true":
        return key, json.dumps(value, ensure_ascii=False)
    return key, json_of(value, key, schema, says_json=True)


def _glm_name(reader: Reader) -> Steps[str]:
    """Up to the line's end or the first tag."""
    yield from reader.skip_any()
    while not any(stop in reader.rest for stop in "\n<"):
        if not (yield from reader.more()):
            return ""
    name = min(reader.rest.split("\n")[0], reader.rest.split("<")[0], key=len)
    yield from reader.skip(name)
    return name.strip()


def qwen_coder_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(mark(OPEN), g.text(f"\n<function={tool.name}>\n"), g.schema(tool.schema, "qwen_xml"),
                       g.text("\n</function>\n"), mark(CLOSE)) for tool in tools]
    return g.calls(each, g.text("\n"), several)


def glm_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(mark(OPEN), g.text(f"{tool.name}\n"), g.schema(tool.schema, "glm_xml"), g.text("\n"),
                       mark(CLOSE)) for tool in tools]
    return g.calls(each, g.text("\n"), several)


def deepseek_v32_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(g.text(f'<{DSML}invoke name="{tool.name}">\n'), g.schema(tool.schema, "deepseek_xml"),
                       g.text(f"\n</{DSML}invoke>")) for tool in tools]
    return g.sequence(g.text(f"<{DSML}function_calls>\n"), g.calls(each, g.text("\n"), several),
                      g.text(f"\n</{DSML}function_calls>"))
