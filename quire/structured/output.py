"""What a sequence has written so far, as its grammar sees it: a view on its tokens, which only grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class Output(Sequence[int]):
    """The tokens after the prompt. Nothing is copied: a token costs the same however long the answer is.

    Whoever makes one promises that tokens seen through it never change, so what was compared once is not again.
    """

    __slots__ = ("_start", "_tokens")

    def __init__(self, tokens: list[int], start: int) -> None:
        self._tokens, self._start = tokens, start

    def __len__(self) -> int:
        return len(self._tokens) - self._start

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, int):
            return self._tokens[place + self._start if place >= 0 else place]
        first, last, step = place.indices(len(self))
        return self._tokens[first + self._start : last + self._start : step]


def agreement(output: Sequence[int], known: Sequence[int], agreed: int) -> int:
    """How many tokens `output` and `known` have in common from the start; the first `agreed` of an `Output` do."""
    place = agreed if isinstance(output, Output) else 0
    end = min(len(output), len(known))
    while place < end and output[place] == known[place]:
        place += 1
    return min(place, end)
