"""Splits what a model thinks, between <think> and </think>, from what it answers."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the start of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


class ReasoningSplitter:
    """Takes text as it comes; gives (reasoning, answer) pieces. Marks may be cut anywhere between two pieces."""

    __slots__ = ("_buffer", "_fresh", "_state")

    def __init__(self, thinking: bool) -> None:
        """`thinking`: the prompt has opened the mark already."""
        self._state = "thinking" if thinking else "start"
        self._buffer = ""
        self._fresh = True
        """Nothing of the present part was given yet: the line breaks around marks are not part of it."""

    def push(self, text: str) -> tuple[str, str]:
        if self._state == "answer" and not self._fresh:
            return "", text
        self._buffer += text
        if self._state == "start":
            self._start()
        reasoning = self._think() if self._state == "thinking" else ""
        return reasoning, self._answer() if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        rest, self._buffer = self._buffer, ""
        if self._state == "thinking":
            return rest, ""
        return "", rest

    def _start(self) -> None:
        seen = self._buffer.lstrip()
        if seen.startswith(OPEN):
            self._buffer, self._state = seen[len(OPEN):], "thinking"
        elif not OPEN.startswith(seen):
            # No thoughts: the whole text is the answer, white space at its start included.
            self._state, self._fresh = "answer", False

    def _think(self) -> str:
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        thought, mark, rest = self._buffer.partition(CLOSE)
        if mark:
            self._state, self._buffer, self._fresh = "answer", rest, True
            return thought.rstrip("\n")
        # The line breaks before the closing mark are part of it.
        keep = held_back(self._buffer, CLOSE)
        end = len(self._buffer) - keep
        while end > 0 and self._buffer[end - 1] == "\n":
            end -= 1
        shown, self._buffer = self._buffer[:end], self._buffer[end:]
        self._fresh = self._fresh and not shown
        return shown

    def _answer(self) -> str:
        if self._fresh:
            self._buffer = self._buffer.lstrip("\n")
        shown, self._buffer = self._buffer, ""
        self._fresh = self._fresh and not shown
        return shown
