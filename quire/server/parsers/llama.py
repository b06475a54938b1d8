"""Llama's calls: JSON objects with name and parameters, or a Python list, bare or behind a mark."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.hermes import read_objects
from quire.server.parsers.pythonic import read_list
from quire.server.parsers.reader import Reader, Steps

MARKS = ("<|python_tag|>", "<|python_start|>")
END = "<|python_end|>"


def read(reader: Reader) -> Steps[None]:
    """What has no mark may be an answer: it is a call only if it names a tool."""
    first = yield from reader.first_visible()
    if first in ("{", "["):
        reader.attempt()
        yield from reader.skip_any()
        yield from _bare_objects(reader) if first == "{" else read_list(reader, known_only=True)
    while (yield from reader.text_until(*MARKS)):
        yield from reader.skip_any()
        yield from read_list(reader, known_only=False) if reader.rest[:1] == "[" else read_objects(reader, ";")
        yield from reader.skip_any()
        yield from reader.skip(END)


def _bare_objects(reader: Reader) -> Steps[None]:
    called = yield from reader.json_call(known_only=True)
    while called:
        yield from reader.skip_any(" \t\r\n;")
        called = reader.rest.startswith("{") and (yield from reader.json_call())


def grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    return g.calls([g.json_call(tool, "parameters") for tool in tools], g.text("; "), several)
