"""DeepSeek V3's and V3.1's calls: each between marks, the name before a separator, the arguments as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.reader import Reader, Steps

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def read(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until(ALL, OPEN)) is not None:
        yield from reader.skip_any()
        yield from reader.skip(OPEN)
        name = yield from _name(reader)
        if not name:
            reader.give_back()
            continue
        reader.call(name)
        yield from reader.json_arguments()
        yield from reader.take_until(CLOSE)  # V3 ends its code block before it
        yield from reader.skip_any()
        yield from reader.skip(ALL_END)


def _name(reader: Reader) -> Steps[str | None]:
    """V3 writes the kind of the tool, a separator, the name and a code block; V3.1 the name and a separator."""
    head = yield from reader.take_until(SEPARATOR)
    if head is None or head.strip() != "function":
        return None if head is None else head.strip()
    name = yield from reader.take_until("```json")
    return None if name is None else name.strip()


def v3_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(mark(OPEN), g.text("function"), mark(SEPARATOR), g.text(f"{tool.name}\n```json\n"),
                       g.schema(tool.schema), g.text("\n```"), mark(CLOSE)) for tool in tools]
    return g.sequence(mark(ALL), g.calls(each, g.text("\n"), several), mark(ALL_END))


def v31_grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    each = [g.sequence(mark(OPEN), g.text(tool.name), mark(SEPARATOR), g.schema(tool.schema), mark(CLOSE))
            for tool in tools]
    return g.sequence(mark(ALL), g.calls(each, None, several), mark(ALL_END))
