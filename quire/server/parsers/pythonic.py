"""Calls as a Python list, Llama 4's and Llama 3.2's: [weather(city="Oslo", days=2), time()]."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from quire.server.parsers import grammar as g
from quire.server.parsers.reader import Reader, Steps

_HEAD = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]{0,63})\(")
_MAYBE_HEAD = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_.-]{0,63})?")
_JSON_WORDS = {"true": True, "false": False, "null": None}


def read_list(reader: Reader, known_only: bool) -> Steps[None]:
    """A list of calls, on trial: one that begins with no call (`known_only`: to a tool that exists) is given back."""
    yield from reader.skip("[")
    before = reader.num_calls
    while True:
        call = yield from _call(reader, reader.num_calls > before)
        if call is None or (known_only and reader.num_calls == before and call[0] not in reader.tools):
            break
        reader.call(call[0])
        reader.arguments(call[1])
        yield from reader.skip_any(" \t\r\n,")
        if (yield from reader.skip("]")):
            return
    if reader.num_calls == before:
        reader.give_back()


def _call(reader: Reader, follows: bool) -> Steps[tuple[str, str] | None]:
    """Name and arguments (JSON) of the next call, when it is complete; None where none follows. What is none is read
    only when it is one by its brackets. `follows`: there was a call before, so that one that is cut off is no text."""
    while not (head := _HEAD.match(reader.rest)):
        if not _MAYBE_HEAD.fullmatch(reader.rest):
            return None
        if not (yield from reader.more()):
            _cut_off(reader, follows)
            return None
    extent, seen = _Brackets(), head.end() - 1
    while not extent.closed:
        seen += extent.push(reader.rest[seen:])
        if not extent.closed and not (yield from reader.more()):
            _cut_off(reader, follows)
            return None
    text = reader.rest[:seen]
    yield from reader.skip(text)
    arguments = _arguments(text[head.end(1):].strip())
    return None if arguments is None else (head[1], arguments)


def _cut_off(reader: Reader, follows: bool) -> None:
    if follows:
        reader.drop_rest()


class _Brackets:
    """Finds the bracket that closes the first one."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._quote = ""
        self._escape = False

    def push(self, text: str) -> int:
        """How many characters of `text` stand before or are the closing bracket."""
        for place, char in enumerate(text):
            if self._quote:
                if not self._escape and char == self._quote:
                    self._quote = ""
                self._escape = char == "\\" and not self._escape
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return place + 1
        return len(text)


def _arguments(text: str) -> str | None:
    """Keyword arguments as a JSON object; None where they are anything but literals. Nothing is evaluated."""
    try:
        parsed = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args:
            return None
        values = {str(keyword.arg): _literal(keyword.value) for keyword in parsed.keywords if keyword.arg}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(ast.literal_eval(key)): _literal(value) for key, value in zip(node.keys, node.values) if key}
    return ast.literal_eval(node)


def grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(g.text(f"{tool.name}("), _keywords(tool), g.text(")")) for tool in tools]
    return g.sequence(g.text("["), g.calls(each, g.text(", "), several), g.text("]"))


def _keywords(tool: g.ToolShape) -> g.Format:
    """The arguments in the schema's order, required ones first: what may be left out stands at the end."""
    properties = dict(tool.schema.get("properties") or {})
    needed = [name for name in properties if name in (tool.schema.get("required") or [])]
    shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}

    def written(name: str) -> g.Format:
        of = properties[name]
        return g.sequence(g.text(f"{name}="), g.schema({**of, **shared} if isinstance(of, dict) else of))

    parts: list[g.Format] = []
    for place, name in enumerate(needed):
        parts += [g.text(", "), written(name)] if place else [written(name)]
    for name in properties:
        if name not in needed and parts:
            parts.append(g.optional(g.sequence(g.text(", "), written(name))))
    if not parts and properties:
        parts = [g.optional(g.one_of([written(name) for name in properties]))]
    return g.sequence(*parts) if parts else g.text("")
