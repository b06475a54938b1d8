"""JSON as it comes: where a value ends, and the name and arguments of a call before its object is complete."""

from __future__ import annotations

import json

_ARGUMENT_KEYS = ("arguments", "parameters")
_NAME_KEYS = ("name", "function")


class JsonExtent:
    """Finds the end of an object or array."""

    __slots__ = ("_depth", "_escape", "_string", "done")

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._string = self._escape = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
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
                    return place + 1
        return len(text)


class JsonCall:
    """Reads one call's JSON object as it comes, handing on the text of its arguments before it is complete."""

    __slots__ = ("_args", "_depth", "_escape", "_key", "_raw", "_role", "_string", "done", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self._args: list[str] = []
        self._depth = 0
        self._string = self._escape = False
        self._key, self._role = "", "key"
        self._raw: list[str] = []
        """Characters of the key or value that is being read; of an object or array the first one only."""

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the call."""
        for place, char in enumerate(text):
            if self._string:
                self._in_string(char)
            else:
                self._outside_string(char)
            if self.done:
                return place + 1
        return len(text)

    def take_arguments(self) -> str:
        """What is new of the arguments; nothing before the name is known."""
        if self.name is None:
            return ""
        found, self._args = "".join(self._args), []
        return found

    def _add(self, char: str) -> None:
        """A character of a key or value at the top of the object."""
        if not self._raw or self._raw[0] not in "{[":
            self._raw.append(char)
        if self._role == "value" and self._key in _ARGUMENT_KEYS and self._raw[0] in "{[":
            self._args.append(char)

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
                self._raw = []
            self._add(char)
        elif char in "{[":
            self._depth += 1
            if self._depth == 2:
                self._raw = []
            if self._depth > 1:
                self._add(char)
        elif char in "}]":
            self._close(char)
        elif self._depth > 1:
            self._add(char)
        elif char == ":":
            self._role, self._raw = "value", []
        elif char == ",":
            self._end()
            self._role, self._raw = "key", []
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
        raw, self._raw = "".join(self._raw), []
        if not raw or raw[0] in "{[":
            return
        try:
            value = json.loads(raw)
        except ValueError:
            return
        if self._role == "key":
            self._key = value if isinstance(value, str) else ""
        elif self._key in _NAME_KEYS and isinstance(value, str) and value:
            # The first name counts: a stream has sent it by the time a second one comes.
            self.name = self.name or value
        elif self._key in _ARGUMENT_KEYS:
            # Some models write the arguments as a text that holds JSON; none at all is an empty object.
            self._args.append(value if isinstance(value, str) and value else "{}")
