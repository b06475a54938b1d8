"""Mistral's calls: [TOOL_CALLS] and an array of objects, or since 2025 a name, [ARGS] and the arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.hermes import read_objects
from quire.server.parsers.reader import Reader, Steps

MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?(?=\{)")
_MAYBE_NAMED = re.compile(r"[A-Za-z0-9_.-]{1,64}(?:\[[A-Za-z0-9_\]\[]{0,80})?")


def read(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until(MARK)):
        yield from reader.skip_any()
        name = yield from _name(reader)
        if name is None:
            yield from read_objects(reader, "[,]")
        else:
            reader.call(name)
            yield from reader.json_arguments()


def _name(reader: Reader) -> Steps[str | None]:
    """The name before an object of arguments, read with what stands between them."""
    while True:
        found = _NAMED.match(reader.rest)
        if found:
            yield from reader.skip(found[0])
            return found[1]
        if not _MAYBE_NAMED.fullmatch(reader.rest) or not (yield from reader.more()):
            return None


def grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    return g.sequence(mark(MARK), g.json_array(tools, several))


def named_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(mark(MARK), g.text(tool.name), mark("[ARGS]"), g.schema(tool.schema)) for tool in tools]
    return g.calls(each, None, several)
