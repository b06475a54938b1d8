"""Llama 3's calls: a JSON object with name and parameters, bare or behind <|python_tag|>, several with semicolons."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.hermes import read_objects
from quire.server.parsers.reader import Reader, Steps

MARK = "<|python_tag|>"


def read(reader: Reader) -> Steps[None]:
    """A bare object may be an answer: it is a call only if it names a tool."""
    if (yield from reader.first_visible()) == "{":
        reader.attempt()
        yield from reader.skip_any()
        called = yield from reader.json_call(known_only=True)
        while called:
            yield from reader.skip_any(" \t\r\n;")
            called = reader.rest.startswith("{") and (yield from reader.json_call())
    while (yield from reader.text_until(MARK)):
        yield from read_objects(reader, ";")


def grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    return g.calls([g.json_call(tool, "parameters") for tool in tools], g.text("; "), several)
