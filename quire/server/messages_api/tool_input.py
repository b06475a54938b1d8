"""The input of a tool_use block: arguments as a model writes them, handed on by whole keys and values.

Clients of this API parse the input, and a stream cannot take back what it has sent. So a value is handed on when it is
complete and valid JSON; where the text is cut off or is no JSON, the object is closed behind the last good value. A
whole answer is made by the same code, so both have the same input, and nobody runs a tool with half a text.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from quire.server.parsers.pieces import whole_characters

_DEEPEST = 256
"""What is nested deeper could not be encoded."""


class ToolInput:
    """Takes the text of one call's arguments as it comes."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}
        self._held: list[str] = []
        """What has come of the key and value that are not complete."""
        self._depth = 0
        self._string = self._escape = self._over = False

    def push(self, text: str) -> str:
        """What of the object's JSON may be sent now."""
        sent, start = "", 0
        for place, char in enumerate(text):
            if self._over:
                break
            if self._string:
                self._string = self._escape or char != '"'
                self._escape = char == "\\" and not self._escape
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
                self._over = self._depth > _DEEPEST
                if self._depth == 1:
                    start, self._over = place + 1, char != "{"
            elif char in "}]" or (char == "," and self._depth == 1):
                self._depth -= char != ","
                if self._depth == 0 or char == ",":
                    sent += self._pair("".join([*self._held, text[start:place]]), last=self._depth == 0)
                    self._held, start = [], place + 1
            elif self._depth == 0 and not char.isspace():
                self._over = True
        if not self._over:
            self._held.append(text[start:])
        return sent

    def end(self) -> str:
        """What closes the object that was sent."""
        return "}" if self.value else ""

    def _pair(self, text: str, last: bool) -> str:
        """The JSON of a key and its value. A key or value that is not valid JSON ends the object."""
        self._over = last
        if last and not text.strip():
            return ""
        try:
            found = json.loads("{" + text + "}", strict=False, parse_constant=_refuse)
            written = whole_characters(json.dumps(found, ensure_ascii=False, allow_nan=False))
            if len(found) != 1:
                raise ValueError("no single pair")
        except (ValueError, RecursionError):
            self._over = True
            return ""
        begin = ", " if self.value else "{"
        self.value.update(json.loads(written))
        return begin + written[1:-1]


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
