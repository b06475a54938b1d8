"""Tells thoughts from the answer behind them, where a model marks them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.parsers import grammar as g
from quire.server.parsers.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """What stands before and behind a model's thoughts."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Has the prompt opened the thoughts already? Then the model only closes them."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Has the prompt closed them: is there nothing to think?"""
        return prompt.rstrip().endswith(self.close)

    def read(self, reader: Reader, opened: bool) -> Steps[None]:
        """Thoughts at the start of a text. The line breaks around the marks are not part of them."""
        if not opened:
            yield from reader.first_visible()
            if not (yield from _visible_mark(reader, self.open)):
                return
        held, fresh = "", True

        def think(text: str) -> None:
            nonlocal held, fresh
            text = held + (text.lstrip("\n") if fresh else text)
            shown = text.rstrip("\n")
            held, fresh = text[len(shown):], fresh and not text
            reader.think(shown)

        closed = yield from reader.until([self.close], think)
        reader.thoughts_end()
        if closed is None:
            reader.think(held)  # cut off: what was held back is part of it
        else:
            yield from reader.skip_any("\n")

    def grammar(self, inner: g.Format, opened: bool, mark: g.Mark) -> g.Format:
        """A shape that holds after the thoughts, not in them."""
        thinking = [g.free_text(self.close), mark(self.close), g.SPACES]
        if opened:
            return g.sequence(*thinking, inner)
        return g.sequence(g.optional(g.sequence(mark(self.open), *thinking)), inner)


def _visible_mark(reader: Reader, mark: str) -> Steps[bool]:
    """Read a mark, with white space before it, if that is what the text starts with."""
    while True:
        seen = reader.rest.lstrip()
        if seen.startswith(mark):
            break
        if not mark.startswith(seen) or not (yield from reader.more()):
            return False
    yield from reader.skip_any()
    return (yield from reader.skip(mark))


THOUGHTS = {
    "think": ThoughtMarks("<think>", "</think>"),
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "granite": ThoughtMarks("Here is my thought process:", "Here is my response:"),
}
