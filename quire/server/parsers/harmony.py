"""gpt-oss' harmony: messages in channels, analysis for thoughts, commentary for calls, final for the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.server.parsers import grammar as g
from quire.server.parsers.reader import Reader, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.:-]{1,128})")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


def read(reader: Reader) -> Steps[None]:
    """The prompt ends with <|start|>assistant: the first message begins with the rest of its header."""
    if not (yield from _header_follows(reader)):
        return  # an answer without channels
    while True:
        header = yield from reader.take_until(MESSAGE)
        if header is None:
            reader.drop_rest()  # half a header is not part of the answer
            return
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        thinks = channel is not None and channel[1] == "analysis"
        hand_on = reader.think if thinks else reader.say
        if recipient and recipient[1] != "assistant":
            reader.call(recipient[1].removeprefix("functions."))
            yield from reader.json_arguments()
            hand_on = _drop
        end = yield from reader.until(ENDS, hand_on)
        if thinks and hand_on is not _drop:
            reader.thoughts_end()
        if end is None:
            return
        yield from reader.skip(START)


def _header_follows(reader: Reader) -> Steps[bool]:
    if (yield from reader.looks_at(CHANNEL)) or (yield from reader.looks_at(START)):
        return True
    return (yield from reader.looks_at(" to=")) or (yield from reader.looks_at("to="))


def _drop(text: str) -> None:
    """What stands between the arguments of a call and its end."""


def grammar(tools: Sequence[g.ToolShape], several: bool, mark: g.Mark) -> g.Format:
    """One call, after thoughts if there are any: its end ends the turn, so there are never several."""
    return _after_analysis(g.one_of([
        g.sequence(mark(CHANNEL), g.text(f"commentary to=functions.{tool.name} "), mark(CONSTRAIN), g.text("json"),
                   mark(MESSAGE), g.schema(tool.schema)) for tool in tools]), mark)


def answer_grammar(inner: g.Format, mark: g.Mark) -> g.Format:
    """A shape for the final channel."""
    return _after_analysis(g.sequence(mark(CHANNEL), g.text("final"), mark(MESSAGE), inner), mark)


def _after_analysis(message: g.Format, mark: g.Mark) -> g.Format:
    thoughts = g.sequence(mark(CHANNEL), g.text("analysis"), mark(MESSAGE), g.free_text("<|"), mark("<|end|>"),
                          mark(START), g.text("assistant"))
    return g.sequence(g.optional(thoughts), message)
