"""A random matrix of which a rank wants a part: drawn a few rows at a time, the same numbers whoever wants what."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.unread import UnreadRows
from quire.models.stored_parts import NOTHING, Ranges

AT_ONCE = 1 << 20
"""Numbers that exist at once, beside those that are wanted."""
KEPT_BYTES = 64 << 20
"""Of a part that waits for another one. Of more it is drawn once more when it is packed."""


class RandomRows:
    """Uniform numbers from one generator, which draws matrix after matrix. (torch draws number after number, so that
    pieces are those of the whole; a test holds it to that.)

    Its rows can be asked for before the next matrix is drawn, and after `settle` also later."""

    def __init__(
        self, shape: tuple[int, int], wanted: Ranges | None, generator: torch.Generator, bound: float,
        dtype: torch.dtype,
    ) -> None:
        self._rows, self._width = shape
        self._generator = generator
        self._dim, self._runs = wanted or (0, ((0, self._rows),))
        self._nothing = wanted == NOTHING
        self._bound = bound
        self._dtype = dtype
        self._step = max(1, AT_ONCE // self._width)
        self._pieces = -(-self._rows // self._step)
        # Arrays of their own, once: what comes and goes between those that stay would leave holes in memory.
        self._piece = torch.empty(min(self._step, self._rows), self._width)
        self._holds: int | None = None
        """Which piece that is."""
        self._begins = torch.empty(self._pieces, len(generator.get_state()), dtype=torch.uint8)
        """What the generator was in before each piece."""
        self._drawn = 0
        """So many it has drawn."""
        self._used = False
        """Its last row was asked for: it has been packed."""
        self._kept: Tensor | None = None
        """The wanted part, once it has been drawn to be kept."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the wanted part."""
        count = sum(stop - start for start, stop in self._runs)
        return (self._rows, count) if self._dim else (count, self._width)

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self._dtype.itemsize

    def unread(self) -> UnreadRows:
        return UnreadRows(0, self.shape, self.read)

    def whole(self) -> Tensor:
        """The wanted part. The generator is behind the matrix then."""
        if self._kept is None:
            self._kept = torch.empty(self.shape, dtype=self._dtype)
            for index in range(self._pieces):
                self._copy(index, 0, self._kept)
        return self._kept

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the wanted part."""
        if self._kept is not None:
            return self._kept[start:stop]
        self._used |= stop == self.shape[0]
        found = torch.empty(stop - start, self.shape[1], dtype=self._dtype)
        for index in self._holding(start, stop):
            self._copy(index, start, found)
        return found

    def settle(self) -> None:
        """Draw what has not been: the generator is behind the matrix then. What waits to be packed is kept."""
        if not self._used and not self._nothing and self.nbytes <= KEPT_BYTES:
            self.whole()
        while self._drawn < self._pieces:
            self._draw(self._drawn)

    def _holding(self, start: int, stop: int) -> list[int]:
        """The pieces that rows [start, stop) of the wanted part lie in."""
        found: list[int] = []
        before = 0
        for first, last in ((0, self._rows),) if self._dim else self._runs:
            low, high = max(start - before, 0), min(stop - before, last - first)
            if low < high:
                found += range((first + low) // self._step, -(-(first + high) // self._step))
            before += last - first
        return list(dict.fromkeys(found))

    def _copy(self, index: int, begin: int, out: Tensor) -> None:
        """What a piece has of the rows of the wanted part that begin with `begin`."""
        self._draw(index)
        first, count, place = index * self._step, min(self._step, self._rows - index * self._step), 0
        if self._dim == 1:
            low, high = max(first, begin), min(first + count, begin + len(out))
            for start, stop in self._runs:
                out[low - begin : high - begin, place : place + stop - start] = self._piece[
                    low - first : high - first, start:stop]
                place += stop - start
            return
        for start, stop in self._runs:
            shift = place - start - begin  # from a row of the matrix to one of `out`
            low, high = max(start, first, -shift), min(stop, first + count, len(out) - shift)
            if low < high:
                out[low + shift : high + shift] = self._piece[low - first : high - first]
            place += stop - start

    def _draw(self, index: int) -> None:
        """With the generator itself the pieces that it has not drawn, up to this one; with another one what it has."""
        if self._holds == index:
            return
        if index < self._drawn:
            again = torch.Generator()
            again.set_state(self._begins[index].clone())  # of a view torch reads another place
            self._fill(index, again)
        while self._drawn <= index:
            self._begins[self._drawn] = self._generator.get_state()
            self._fill(self._drawn, self._generator)
            self._drawn += 1

    def _fill(self, index: int, generator: torch.Generator) -> None:
        count = min(self._step, self._rows - index * self._step)
        self._piece[:count].uniform_(-self._bound, self._bound, generator=generator)
        self._holds = index
