"""How commands look: colours on a terminal, text wrapped above a live status line, sizes for people."""

from __future__ import annotations

import os
import shutil
import sys
import time
import unicodedata
from types import TracebackType
from typing import TextIO

DIM, BOLD, GREEN, CYAN = "2", "1", "32", "36"
_MIN_WIDTH = 20


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style, where `stream` is a terminal."""
    return f"\x1b[{style}m{text}\x1b[0m" if stream.isatty() else text


def terminal_width() -> int:
    return max(_MIN_WIDTH, shutil.get_terminal_size().columns)


def size_text(size: float) -> str:
    """Bytes for people: 538.1 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def bar(share: float, width: int = 24) -> str:
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "░" * (width - full)


def process_age() -> float:
    """Seconds since this process started, interpreter included; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat") as file:
            # The second field is the program's name in parentheses, and may hold spaces.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0


def columns_of(char: str) -> int:
    """Columns that a character takes on a terminal."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def printable(text: str) -> str:
    """Text of a model without control characters, which could drive the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


class LiveText:
    """Writes text as it is made, word-wrapped on a terminal, with a status line kept below it.

    Piped, the text goes out as it is, and there is no status. Words are held back until they are complete, so
    that none is broken at the end of a line.
    """

    def __init__(self, stream: TextIO | None = None, *, status: bool = True) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._status_wanted = status and self._live
        self._column = 0
        self._word = ""
        self._has_status = False
        self._written = False
        self._width = terminal_width()

    def __enter__(self) -> LiveText:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A line of its own for nothing, where an error says why there is nothing, would be an answer.
        self.finish(end_line=kind is None or self._written)

    def write(self, text: str, status: str = "") -> None:
        """Add text; on a terminal, redraw the line below it."""
        if not self._live:
            self._stream.write(text)
            self._stream.flush()
            self._written = True
            return
        self._width = terminal_width()
        out = ["\x1b[J"] if self._has_status else []
        self._has_status = False
        for char in printable(text):
            self._take(char, out)
        self._put_status(status, out)
        self._stream.write("".join(out))
        self._stream.flush()

    def finish(self, end_line: bool = True) -> None:
        """Write what was held back, take the status line away, and end the line."""
        if self._live:
            out = ["\x1b[J"] if self._has_status else []
            self._has_status = False
            self._flush_word(out)
            self._stream.write("".join(out))
        if self._column or (not self._live and end_line):
            self._stream.write("\n")
        self._column = 0
        self._stream.flush()

    def _take(self, char: str, out: list[str]) -> None:
        if char in " \t\n":
            self._flush_word(out)
            if char == "\n":
                self._column = 0
                out.append("\n")
            elif self._column < self._width - 1:
                self._column += 1
                out.append(" ")
        else:
            self._word += char
            if columns_of(char) == 2 or len(self._word) > self._width // 2:
                self._flush_word(out)  # scripts without spaces break anywhere

    def _flush_word(self, out: list[str]) -> None:
        width = sum(map(columns_of, self._word))
        if self._column and self._column + width > self._width - 1:
            out.append("\n")
            self._column = 0
        out.append(self._word)
        self._column += width
        self._word = ""

    def _put_status(self, status: str, out: list[str]) -> None:
        if not self._status_wanted or not status:
            return
        shown = status[: self._width - 1]
        forward = f"\x1b[{self._column}C" if self._column else ""
        out.append(f"\n\x1b[{DIM}m{shown}\x1b[0m\r\x1b[1A{forward}")
        self._has_status = True
