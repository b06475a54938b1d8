"""Server-sent events out of a stream of bytes, however it is cut."""

from __future__ import annotations


class EventParser:
    """Feed it bytes; it gives the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    @property
    def pending(self) -> int:
        """Bytes of an event that is not complete."""
        return len(self._rest) + sum(map(len, self._data))

    def feed(self, piece: bytes) -> list[bytes]:
        events: list[bytes] = []
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
