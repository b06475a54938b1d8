"""The text of a model as parsers read it: they are generators, which pause where the text so far ends.

A parser asks for what should come next (`text_until`, `skip`, `take_until`, `json_call`), so it reads like the format
it knows. Where the answer needs more text it yields, and goes on when there is more; at the end of the text every
question has an answer. So a stream and a whole text take the same path, wherever the stream is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from quire.server.parsers.json_text import JsonCall, JsonExtent
from quire.server.parsers.pieces import CallDelta, Content, Piece, Thought, call_id, joined, whole_characters

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
ToolSchemas = Mapping[str, Mapping[str, Any]]
"""By name of the tool: the JSON schema of its arguments."""


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the start of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


class Reader:
    """Text that comes in pieces on one side, pieces of an answer on the other."""

    def __init__(self, tools: ToolSchemas, *, most: int | None = None, only_calls: bool = False,
                 make_id: Callable[[], str] = call_id) -> None:
        """`most`: calls beyond so many are left out. `only_calls`: a grammar has made the text calls, so that what is
        no call was cut off, and is dropped."""
        self.tools = tools
        self._only_calls = only_calls
        self.num_calls = 0
        self._most = most
        self._make_id = make_id
        self._text = ""
        self._ended = False
        self._found: list[Piece] = []
        self._tried: list[str] | None = None
        """What was read of a call that may turn out to be none; None: there is none on trial."""
        self._space = ""
        """White space that is content only if more content follows, and no call."""
        self._after_call = False
        self._ids: set[str] = set()
        self._bytes_read = 0
        self.thought_bytes = 0
        """How much of the text, in bytes of UTF-8, is thoughts and what stands before them."""

    # The side of the text.

    def feed(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._ended = True

    def take(self) -> list[Piece]:
        """What was found since the last time."""
        found, self._found = self._found, []
        return joined(found)

    # The side of the parser: what it reads.

    @property
    def rest(self) -> str:
        """What has come and was not read."""
        return self._text

    def more(self) -> Steps[bool]:
        """Wait for more text; False where there is none any more."""
        if self._ended:
            return False
        yield
        return True

    def until(self, marks: Sequence[str], hand_on: Callable[[str], None]) -> Steps[str | None]:
        """Hand on the text before the first of the marks, as it comes; which mark it was, None where none came."""
        while True:
            places = [(self._text.find(mark), mark) for mark in marks if mark in self._text]
            if places:
                place, mark = min(places)
                hand_on(self._read(place))
                self._read(len(mark))
                return mark
            keep = 0 if self._ended else max(held_back(self._text, mark) for mark in marks)
            hand_on(self._read(len(self._text) - keep))
            if not (yield from self.more()) and not self._text:
                return None

    def text_until(self, *marks: str) -> Steps[str | None]:
        """Content up to a mark. What follows the mark is on trial: `give_back` makes it content after all."""
        self._tried = None
        mark = yield from self.until(marks, self.say)
        if mark is not None:
            self._tried = [mark]
        return mark

    def attempt(self) -> None:
        """What is read from here on may turn out to be no call."""
        self._tried = []

    def looks_at(self, mark: str) -> Steps[bool]:
        """Does `mark` come next? It is not read."""
        while len(self._text) < len(mark) and mark.startswith(self._text):
            if not (yield from self.more()):
                break
        return self._text.startswith(mark)

    def skip(self, mark: str) -> Steps[bool]:
        """Read `mark` if it comes next."""
        found = yield from self.looks_at(mark)
        if found:
            self._read(len(mark))
        return found

    def skip_any(self, characters: str = " \t\r\n") -> Steps[None]:
        """Read whatever there is of these characters."""
        while True:
            self._read(len(self._text) - len(self._text.lstrip(characters)))
            if self._text or not (yield from self.more()):
                return

    def take_until(self, mark: str) -> Steps[str | None]:
        """The text before `mark`, which is read too; None where the mark never comes: then nothing was read."""
        seen = 0
        while True:
            place = self._text.find(mark, max(0, seen - len(mark)))
            if place >= 0:
                found = self._read(place)
                self._read(len(mark))
                return found
            seen = len(self._text)
            if not (yield from self.more()):
                return None

    def first_visible(self) -> Steps[str]:
        """The first character that is no white space, which is not read; "" where there is none."""
        while not self._text.strip():
            if not (yield from self.more()):
                break
        return self._text.lstrip()[:1]

    # The side of the parser: what it finds.

    def think(self, text: str) -> None:
        if text:
            self._found.append(Thought(text))

    def thoughts_end(self) -> None:
        """What was read so far is thoughts."""
        self.thought_bytes = self._bytes_read

    def say(self, text: str) -> None:
        """Content. White space around calls is not part of it, however the text is cut."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown):]
        if shown and not self._only_calls:
            self._found.append(Content(shown))

    def say_all(self) -> None:
        """All that has come is content."""
        self.say(self._read(len(self._text)))

    def say_rest(self) -> None:
        """No more will come: white space at the end of a text without calls is content too."""
        self.say_all()
        if self._space and not self.num_calls and not self._only_calls:
            self._found.append(Content(self._space))
        self._space = ""

    def drop_rest(self) -> None:
        """Drop what is left: it was cut off."""
        self._read(len(self._text))

    def give_back(self) -> None:
        """It was no call: what was read since the mark is content, and so is the mark."""
        tried, self._tried = self._tried or [], None
        self.say("".join(tried))

    def call(self, name: str, written_id: str | None = None) -> None:
        """A call begins; its arguments follow."""
        name = whole_characters(name)
        self._tried, self._space, self._after_call = None, "", True
        if self._most is None or self.num_calls < self._most:
            # Clients tell calls apart by id.
            found = self._make_id() if written_id is None or written_id in self._ids else written_id
            self._ids.add(found)
            self._found.append(CallDelta(self.num_calls, "", found, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments, JSON, of the call that has begun last."""
        if text and (self._most is None or self.num_calls <= self._most):
            self._found.append(CallDelta(self.num_calls - 1, whole_characters(text)))

    # Two that do both.

    def json_arguments(self) -> Steps[bool]:
        """The arguments of a call whose name was told: one JSON object, handed on as it comes. Was it all there?"""
        extent = JsonExtent()
        yield from self.skip_any()
        if self._text[:1] not in ("{", "["):
            if self._text:
                self.arguments("{}")  # none were written, and none is an empty object
            return False
        while not extent.done:
            self.arguments(self._read(extent.push(self._text)))
            if not extent.done and not (yield from self.more()):
                return False
        return True

    def json_call(self, known_only: bool = False) -> Steps[bool]:
        """A JSON object with a name and arguments. One that names no tool is given back as content."""
        call, started, given = JsonCall(), False, False
        while True:
            self._read(call.push(self._text))
            if call.name is not None and not started and (not known_only or call.name in self.tools):
                self.call(call.name)
                started = True
            if started:
                arguments = call.take_arguments()
                given = given or bool(arguments)
                self.arguments(arguments)
            if call.done or not (yield from self.more()):
                break
        if not started:
            self.give_back()
        elif call.done and not given:
            self.arguments("{}")
        return started

    def _read(self, size: int) -> str:
        found, self._text = self._text[:size], self._text[size:]
        self._bytes_read += len(found) if found.isascii() else len(found.encode("utf-8", "surrogatepass"))
        if self._tried is not None:
            self._tried.append(found)
        return found


class OutputParser:
    """Takes text as it comes, gives pieces of the answer."""

    def __init__(self, steps: Callable[[Reader], Steps[None]], reader: Reader) -> None:
        self._reader = reader
        self._steps: Steps[None] | None = steps(reader)

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    @property
    def thought_bytes(self) -> int:
        return self._reader.thought_bytes

    def push(self, text: str) -> list[Piece]:
        self._reader.feed(text)
        self._go_on()
        return self._reader.take()

    def finish(self) -> list[Piece]:
        """The text has ended."""
        self._reader.end()
        self._go_on()
        self._reader.say_rest()
        return self._reader.take()

    def _go_on(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
                return
            except StopIteration:
                self._steps = None
        self._reader.say_all()
