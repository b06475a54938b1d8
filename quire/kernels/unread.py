"""Weights that are still in their file, or not made yet: their rows are read while they are packed, a few at a time, so
that no weight is in memory as it came and packed as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from quire.errors import ModelLoadError
from quire.kernels.quantized import CodedWeight, FloatWeight, QuantizedWeight, StoredWeight

if TYPE_CHECKING:  # saying what a weight is must not cost the import of torch
    import torch
    from torch import Tensor

LARGE = 16 << 20
"""Numbers of a weight of codes from which on it is worth it."""
NUMBERS_AT_ONCE = 4 << 20
"""Of a weight's codes, each a byte, beside what they are read from."""
PANEL = 16
"""Rows that are packed together, in whatever is made of codes."""
Read = TypeVar("Read", bound=StoredWeight)


@dataclass(frozen=True, slots=True)
class UnreadWeight(CodedWeight):
    """A weight of codes."""

    first: int
    """Row of what `read` gives with which it begins."""
    size: tuple[int, int]
    bits: int
    zero: int
    group: int
    offsets: bool
    """Whether it has any."""
    scale_bytes: int
    """1: it has `steps`; 2: half precision holds every scale and offset; else 4."""
    read: Callable[[int, int], QuantizedWeight]
    """Rows [start, stop) of the tensor."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    def rows(self, index: Tensor | Sequence[int] | slice) -> CodedWeight:
        return _some_rows(self, index)

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        return self.whole().columns(start, stop)

    def whole(self) -> QuantizedWeight:
        return self.read(self.first, self.first + self.shape[0])

    def pieces(self) -> Iterator[QuantizedWeight]:
        """All of it, some rows at a time."""
        end, count = self.first + self.shape[0], max(1, NUMBERS_AT_ONCE // max(1, self.shape[1]) // PANEL) * PANEL
        for start in range(self.first, end, count):
            yield self.read(start, min(end, start + count))

    def to(self, device: torch.device) -> QuantizedWeight:
        return self.whole().to(device)

    def dequantized(self) -> Tensor:
        import torch

        found, at = torch.empty(self.shape), 0
        for piece in self.pieces():
            found[at : at + piece.shape[0]] = piece.dequantized()
            at += piece.shape[0]
        return found


@dataclass(frozen=True, slots=True)
class UnreadRows(CodedWeight):
    """A weight of floats, or of what a CPU makes floats of. Of merged experts the rows of all lie one below the
    other."""

    first: int
    size: tuple[int, int]
    read: Callable[[int, int], StoredWeight]
    """Rows [start, stop), in the type that they are stored in. Who keeps them keeps what they were read through."""
    kept: bool = False
    coded: bool = False
    """Made of codes, or of a GGUF: no family stores these turned, and no config excludes them from rounding."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    def rows(self, index: Tensor | Sequence[int] | slice) -> CodedWeight:
        return _some_rows(self, index)

    def columns(self, start: int, stop: int) -> FloatWeight:
        return FloatWeight(self.dequantized()[:, start:stop], self.kept)

    def to(self, device: torch.device) -> FloatWeight:
        return FloatWeight(self.dequantized().to(device), self.kept)

    def whole(self) -> StoredWeight:
        return self.read(self.first, self.first + self.shape[0])

    def dequantized(self) -> Tensor:
        """Floats in the type that they are stored in, codes in float32."""
        found = self.whole()
        return found.dequantized() if isinstance(found, CodedWeight) else found


Unread = TypeVar("Unread", UnreadWeight, UnreadRows)


def _some_rows(weight: Unread, index: Tensor | Sequence[int] | slice) -> Unread:
    """Still unread."""
    if isinstance(index, slice):
        start, stop, step = index.indices(weight.shape[0])
        if step == 1:
            return replace(weight, first=weight.first + start, size=(max(0, stop - start), weight.shape[1]))
        index = range(start, stop, step)
    order = _ordered(weight.read, weight.first, index)
    return replace(weight, first=0, size=(len(index), weight.shape[1]), read=order)


def _ordered(read: Callable[[int, int], Read], first: int, index: Tensor | Sequence[int]) -> Callable[[int, int], Read]:
    """Row i is row index[i], counted from `first`, of what `read` gives. Orders are those of the features of each head,
    so that rows which are asked for together lie near each other: they are read with what lies between them."""
    import torch

    order = torch.as_tensor(index) + first

    def some(start: int, stop: int) -> Read:
        wanted = order[start:stop]
        low, high = (int(wanted.min()), int(wanted.max()) + 1) if len(wanted) else (first, first)
        found, picked = read(low, high), wanted - low
        return found.rows(picked) if isinstance(found, CodedWeight) else found[picked]  # type: ignore[return-value]

    return some


def rows_of(matrix: Tensor | UnreadRows, start: int, stop: int) -> Tensor:
    """Rows [start, stop), in the type that they are stored in."""
    return matrix.rows(slice(start, stop)).dequantized() if isinstance(matrix, UnreadRows) else matrix[start:stop]


def half_holds(*numbers: Tensor | None) -> bool:
    """Whether half precision holds them all, bit for bit."""
    import torch

    return all(torch.equal(each.half().float(), each) for each in numbers if each is not None)


def check_numbers(name: str, weight: StoredWeight) -> None:
    """Refuses what is neither floats of 16 bits or more nor codes with scales."""
    dtype = _type_of(weight)
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        scales = ", or have scales beside them" if dtype.itemsize == 1 else ""
        raise ModelLoadError(f"tensor {name!r} has type {dtype}, but weights are floating point{scales}")


def _type_of(weight: StoredWeight) -> torch.dtype | None:
    """Of numbers as they are stored; None: of codes with scales. Codes whose scales are missing come as numbers."""
    if isinstance(weight, UnreadRows) and not weight.coded:
        return rows_of(weight, 0, 0).dtype
    if isinstance(weight, FloatWeight):
        return weight.floats.dtype
    return None if isinstance(weight, CodedWeight) else weight.dtype
