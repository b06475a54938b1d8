"""Finds tool calls in what a model writes, piece by piece, in the formats that model families use."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass

from quire.server.reasoning import held_back

_ARGUMENT_KEYS = ("arguments", "parameters")
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{1,64})?(?:\[ARGS\])?(?=\{)")
_MAYBE_NAMED = re.compile(r"[A-Za-z0-9_.-]{1,64}(?:\[[A-Za-z0-9_\]]{0,80})?")


@dataclass(slots=True)
class CallDelta:
    """A piece of a tool call: the first of each has `id` and `name`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes its calls."""

    open: str | None
    """The mark before a call; None: the text is calls and nothing else."""
    close: str | None = None
    separators: str = ""
    bare: bool = False
    """A text that starts with a brace is a call too, if it names a tool."""
    special: bool = False
    """The marks are special tokens, which must be kept in the text."""
    forced: str = ""
    """What stands before the arguments of a call to the function %s."""


FORMATS = {
    "hermes": CallFormat("<tool_call>", "</tool_call>", forced='<tool_call>\n{"name": "%s", "arguments": '),
    "llama3": CallFormat("<|python_tag|>", separators=";", bare=True, special=True,
                         forced='{"name": "%s", "parameters": '),
    "mistral": CallFormat("[TOOL_CALLS]", separators="[,]", special=True,
                          forced='[TOOL_CALLS][{"name": "%s", "arguments": '),
}
FORCED_FORMAT = CallFormat(None, separators="[,]")
"""What a grammar makes of tool_choice "required": a JSON array of calls."""


def format_of_template(template: str | None) -> str:
    """The format that a chat template speaks of; Hermes' is what models without one are asked for."""
    if template is not None:
        if "[TOOL_CALLS]" in template:
            return "mistral"
        if "<|python_tag|>" in template or '"parameters": dictionary' in template:
            return "llama3"
    return "hermes"


def call_id(mistral: bool = False) -> str:
    if mistral:  # its template refuses others
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class JsonCall:
    """Reads one call's JSON object as it comes, handing on the text of its arguments before it is complete."""

    __slots__ = ("_args", "_depth", "_escape", "_key", "_raw", "_role", "_string", "done", "name", "text")

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.text = ""
        """All that was read."""
        self._args = ""
        self._depth = 0
        self._string = self._escape = False
        self._key, self._role, self._raw = "", "key", ""

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the call."""
        for place, char in enumerate(text):
            if self._string:
                self._in_string(char)
            else:
                self._outside_string(char)
            if self.done:
                self.text += text[:place + 1]
                return place + 1
        self.text += text
        return len(text)

    def take_arguments(self) -> str:
        """What is new of the arguments; nothing before the name is known."""
        if self.name is None:
            return ""
        found, self._args = self._args, ""
        return found

    def _add(self, char: str) -> None:
        """A character of a key or value at the top of the object."""
        self._raw += char
        if self._role == "value" and self._key in _ARGUMENT_KEYS and self._raw[0] in "{[":
            self._args += char

    def _in_string(self, char: str) -> None:
        self._add(char)
        if self._escape:
            self._escape = False
        elif char == "\\":
            self._escape = True
        elif char == '"':
            self._string = False
            if self._depth == 1:
                self._end()

    def _outside_string(self, char: str) -> None:
        if char == '"':
            self._string = True
            if self._depth == 1:
                self._raw = ""
            self._add(char)
        elif char in "{[":
            self._depth += 1
            if self._depth == 2:
                self._raw = ""
            if self._depth > 1:
                self._add(char)
        elif char in "}]":
            self._close(char)
        elif self._depth > 1:
            self._add(char)
        elif char == ":":
            self._role, self._raw = "value", ""
        elif char == ",":
            self._end()
            self._role, self._raw = "key", ""
        elif not char.isspace():
            self._add(char)

    def _close(self, char: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end()
            self.done = True
            return
        self._add(char)
        if self._depth == 1:
            self._end()

    def _end(self) -> None:
        """A key or a value is complete."""
        raw, self._raw = self._raw, ""
        if not raw:
            return
        try:
            value = json.loads(raw)
        except ValueError:
            return
        if self._role == "key":
            self._key = value if isinstance(value, str) else ""
        elif self._key in ("name", "function") and isinstance(value, str) and value:
            self.name = value
        elif self._key in _ARGUMENT_KEYS and not isinstance(value, dict | list):
            # Some models write the arguments as a text that holds JSON; none at all is an empty object.
            self._args += value if isinstance(value, str) and value else "{}"


class ObjectText:
    """The arguments of a call whose name stood before them: one JSON object, handed on as it is."""

    __slots__ = ("_args", "_depth", "_escape", "_string", "done", "name", "text")

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.done = False
        self.text = self._args = ""
        self._depth = 0
        self._string = self._escape = False

    def push(self, text: str) -> int:
        for place, char in enumerate(text):
            if self._string:
                self._string = self._escape or char != '"'
                self._escape = char == "\\" and not self._escape
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    self._args += text[:place + 1]
                    return place + 1
        self._args += text
        return len(text)

    def take_arguments(self) -> str:
        found, self._args = self._args, ""
        return found


class ToolParser:
    """Takes text as it comes; gives what is content and what belongs to calls."""

    def __init__(self, form: CallFormat, names: Collection[str], *, mistral_ids: bool = False,
                 most: int | None = None) -> None:
        """`most`: calls beyond so many are left out."""
        self._most = most
        self._form = form
        self._names = names
        self._mistral_ids = mistral_ids
        self._buffer = ""
        self._state = "between" if form.open is None else "start" if form.bare else "text"
        self._call: JsonCall | ObjectText | None = None
        self._announced = self._has_arguments = self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._buffer += text
        content = ""
        deltas: list[CallDelta] = []
        while True:
            size, state = len(self._buffer), self._state
            content += self._advance(deltas)
            if not self._buffer or (len(self._buffer) == size and self._state == state):
                return content, [delta for delta in deltas if self._most is None or delta.index < self._most]

    def finish(self) -> tuple[str, list[CallDelta]]:
        """What is left when the text has ended: a call without a name was none."""
        rest, self._buffer = self._buffer, ""
        if self._form.open is None:  # a grammar made it: what is left was cut off, and is no text for anybody
            return "", []
        if self._state == "call" and self._call is not None and not self._announced:
            rest = self._call.text + rest
        elif self._state == "between" and self.num_calls:
            rest = rest.strip(string.whitespace + self._form.separators)
        elif self._state in ("text", "start"):
            rest = rest if not self.num_calls else rest.rstrip()
        return rest, []

    def _advance(self, deltas: list[CallDelta]) -> str:
        if self._state == "start":
            return self._at_start()
        if self._state == "text":
            return self._in_text()
        if self._state == "between":
            return self._between()
        if self._state == "call":
            return self._in_call(deltas)
        content, self._buffer = self._buffer, ""  # "plain": no call can come any more
        return content

    def _at_start(self) -> str:
        seen, mark = self._buffer.lstrip(), self._form.open or ""
        if seen.startswith("{"):
            self._buffer = seen
            self._begin(JsonCall())
        elif seen.startswith(mark):
            self._state = "text"
        elif not mark.startswith(seen):
            self._state = "plain"
        return ""

    def _in_text(self) -> str:
        if self._after_call:  # white space behind a call is not part of the content, however it is cut
            self._buffer = self._buffer.lstrip()
            self._after_call = not self._buffer
        mark = self._form.open or ""
        before, found, rest = self._buffer.partition(mark)
        if found:
            self._buffer, self._state = rest, "between"
            return before.rstrip() if before.strip() else ""
        # White space before a mark is not part of the content, so it waits until something follows.
        keep = held_back(self._buffer, mark)
        end = len(self._buffer[:len(self._buffer) - keep].rstrip())
        shown, self._buffer = self._buffer[:end], self._buffer[end:]
        return shown

    def _between(self) -> str:
        seen = self._buffer.lstrip(string.whitespace + self._form.separators)
        close, mark = self._form.close or "", self._form.open or ""
        named = _NAMED.match(seen) if self._form is FORMATS["mistral"] else None
        if seen.startswith("{"):
            self._buffer = seen
            self._begin(JsonCall())
        elif named:
            self._buffer = seen[named.end():]
            self._begin(ObjectText(named[1]))
        elif close and seen.startswith(close):
            self._buffer, self._state, self._after_call = seen[len(close):], "text", True
        elif mark and seen.startswith(mark):
            self._buffer = seen[len(mark):]
        elif seen and not close.startswith(seen) and not mark.startswith(seen) and not (
                self._form is FORMATS["mistral"] and _MAYBE_NAMED.fullmatch(seen)):
            # Not a call after all: the mark was part of the text.
            self._state = "text" if self.num_calls or not mark else "plain"
            self._buffer = self._buffer if self.num_calls else mark + self._buffer
        return ""

    def _begin(self, call: JsonCall | ObjectText) -> None:
        self._call, self._state, self._announced, self._has_arguments = call, "call", False, False

    def _in_call(self, deltas: list[CallDelta]) -> str:
        call = self._call
        assert call is not None
        used = call.push(self._buffer)
        self._buffer = self._buffer[used:]
        if call.name is not None and not self._announced and self._known(call.name):
            deltas.append(CallDelta(self.num_calls, "", call_id(self._mistral_ids), call.name))
            self._announced = True
            self.num_calls += 1
        if self._announced:
            arguments = call.take_arguments()
            if call.done and not arguments and not self._has_arguments:
                arguments = "{}"  # none were written, and none is an empty object
            if arguments:
                self._has_arguments = True
                deltas.append(CallDelta(self.num_calls - 1, arguments))
        if not call.done:
            return ""
        self._call, self._state = None, "between"
        if self._announced:
            return ""
        self._state = "plain" if self._form.bare else "between"
        return call.text if self._form.bare else f"{self._form.open or ''}{call.text}"

    def _known(self, name: str) -> bool:
        """A bare JSON object may be an answer: it is a call only if it names a tool."""
        return not self._form.bare or name in self._names


class ForcedCall:
    """tool_choice names a function, and a grammar made the text its arguments."""

    def __init__(self, name: str, mistral_ids: bool = False) -> None:
        self._name = name
        self._mistral_ids = mistral_ids
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        deltas = []
        if not self.num_calls:
            self.num_calls = 1
            deltas.append(CallDelta(0, "", call_id(self._mistral_ids), self._name))
        if text:
            deltas.append(CallDelta(0, text))
        return "", deltas

    def finish(self) -> tuple[str, list[CallDelta]]:
        return "", [] if self.num_calls else self.push("")[1]
