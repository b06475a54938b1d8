"""The shapes of forced calls, in the words of xgrammar's structural tags: what a format's grammar is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Format = dict[str, Any]
Mark = Callable[[str], Format]
"""A mark of a model's format: the one token that it is, where it is a special one, or else its text."""
MAX_WHITESPACE = 16
SPACES = {"type": "regex", "pattern": r"[ \n]{0,4}"}


@dataclass(frozen=True, slots=True)
class ToolShape:
    """A tool as a grammar needs it."""

    name: str
    schema: Mapping[str, Any]


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def sequence(*parts: Format) -> Format:
    return {"type": "sequence", "elements": list(parts)}


def one_of(options: Sequence[Format]) -> Format:
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(part: Format) -> Format:
    return {"type": "optional", "content": part}


def schema(of: Mapping[str, Any] | bool, style: str = "json") -> Format:
    found: Format = {"type": "json_schema", "json_schema": of if isinstance(of, bool) else dict(of), "style": style}
    # Between tags white space is part of a text: no more of it than the line breaks that models write there.
    return found | {"max_whitespace_cnt": MAX_WHITESPACE if style == "json" else 1}


def free_text(*without: str) -> Format:
    return {"type": "any_text", "excludes": list(without)}


def calls(each: Sequence[Format], between: Format | None, several: bool) -> Format:
    """One of the calls, or several with something between them."""
    one = one_of(each)
    if not several:
        return one
    further = one if between is None else sequence(between, one)
    return sequence(one, {"type": "star", "content": further})


def json_call(tool: ToolShape, arguments_key: str = "arguments") -> Format:
    """An object with a name and arguments, the name first."""
    head = f'{{"name": "{tool.name}", "{arguments_key}": '
    return sequence(text(head), schema(tool.schema), text("}"))


def json_array(tools: Sequence[ToolShape], several: bool) -> Format:
    return sequence(text("["), calls([json_call(tool) for tool in tools], text(", "), several), text("]"))
