"""Hermes' calls, Qwen's too: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.reader import Reader, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until(OPEN)):
        yield from read_objects(reader, "")
        yield from reader.skip_any()
        yield from reader.skip(CLOSE)


def read_objects(reader: Reader, separators: str) -> Steps[None]:
    """Objects one after the other, behind a mark; without any, the mark was part of the text."""
    first = True
    while True:
        yield from reader.skip_any(" \t\r\n" + separators)
        if not reader.rest.startswith("{"):
            break
        yield from reader.json_call()
        first = False
    if first:
        reader.give_back()


def grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(mark(OPEN), g.text("\n"), g.json_call(tool), g.text("\n"), mark(CLOSE)) for tool in tools]
    return g.calls(each, g.text("\n"), several)
