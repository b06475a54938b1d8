"""Kimi K2's calls: functions.NAME:NUMBER, which is the call's id too, and its arguments, between marks."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.reader import Reader, Steps

ALL, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def read(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until(ALL, OPEN)) is not None:
        yield from reader.skip_any()
        yield from reader.skip(OPEN)
        head = yield from reader.take_until(ARGUMENTS)
        written = (head or "").strip()
        name, _, number = written.rpartition(":")
        if not number.isdigit():
            name, written = written, ""
        name = name.removeprefix("functions.")
        if not name:
            reader.give_back()
            continue
        reader.call(name, written or None)
        yield from reader.json_arguments()
        yield from reader.take_until(CLOSE)
        yield from reader.skip_any()
        yield from reader.skip(ALL_END)


def grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    number = {"type": "regex", "pattern": "[0-9]{1,4}"}
    each = [g.sequence(mark(OPEN), g.text(f"functions.{tool.name}:"), number, mark(ARGUMENTS), g.schema(tool.schema),
                       mark(CLOSE)) for tool in tools]
    return g.sequence(mark(ALL), g.calls(each, None, several), mark(ALL_END))
