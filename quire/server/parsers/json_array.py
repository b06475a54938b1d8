"""Calls as a JSON array behind a mark: Granite 3 and Phi-4-mini, <|tool_call|>[{"name": …, "arguments": {…}}]."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.hermes import read_objects
from quire.server.parsers.reader import Reader, Steps

OPEN, CLOSE, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools["


def read_granite(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until(OPEN, "<tool_call>[")):
        yield from read_objects(reader, "[,]")


def granite_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    return g.sequence(mark(OPEN), g.json_array(tools, several))


def read_phi4(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until(OPEN, FUNCTOOLS)):
        yield from read_objects(reader, "[,]")
        yield from reader.skip(CLOSE)


def phi4_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    return g.sequence(mark(OPEN), g.json_array(tools, several), mark(CLOSE))
