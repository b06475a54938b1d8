"""Numbers, lists and texts as bytes: what the codecs of plans and of results are made of."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

_COUNT = struct.Struct("<I")
_NUMBER = struct.Struct("<q")
SWAPPED = sys.byteorder == "big"
"""Numbers cross in little-endian order; arrays of a big-endian machine are swapped."""


class FieldWriter:
    """Appends values to `data`; `FieldReader` gives them back in the same order."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = bytearray()

    def number(self, value: int) -> None:
        self.data += _NUMBER.pack(value)

    def blob(self, value: bytes) -> None:
        self.data += _COUNT.pack(len(value))
        self.data += value

    def text(self, value: str) -> None:
        self.blob(value.encode("utf-8", "surrogatepass"))

    def column(self, kind: str, values: Iterable[int] | Iterable[float]) -> None:
        """Numbers without their count, which the reader knows. `kind` is a type code of `array`."""
        numbers = array(kind, values)  # type: ignore[arg-type]
        if SWAPPED:
            numbers.byteswap()
        self.data += numbers

    def numbers(self, kind: str, values: Sequence[int] | Sequence[float]) -> None:
        self.data += _COUNT.pack(len(values))
        self.column(kind, values)


class FieldReader:
    """Reads what a `FieldWriter` wrote. Reading past the end raises ValueError."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data, self._at = data, at

    def take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise ValueError(f"a message of {len(self._data)} bytes ends before its fields do")
        return self._data[begin : self._at]

    def number(self) -> int:
        value: int = _NUMBER.unpack(self.take(8))[0]
        return value

    def _count(self) -> int:
        value: int = _COUNT.unpack(self.take(4))[0]
        return value

    def blob(self) -> bytes:
        return self.take(self._count())

    def text(self) -> str:
        return self.blob().decode("utf-8", "surrogatepass")

    def column(self, kind: str, count: int) -> list[int]:
        numbers = array(kind)
        numbers.frombytes(self.take(count * numbers.itemsize))
        if SWAPPED:
            numbers.byteswap()
        return numbers.tolist()

    def numbers(self, kind: str) -> list[int]:
        return self.column(kind, self._count())

    def floats(self) -> list[float]:
        return list(self.column("d", self._count()))

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)
