"""Ranges of tokens that count only when everybody concerned has reported them. No torch."""

from __future__ import annotations

from collections.abc import Collection

from quire.kvtransfer.runs import merged_range

Range = tuple[int, int]


class JoinedRanges:
    """A receiver joins what the ranks of a sender bring it; an engine of several ranks joins what its ranks report."""

    def __init__(self) -> None:
        self._reported: dict[int, list[Range]] = {}

    def add(self, who: int, start: int, end: int, everybody: Collection[int]) -> list[Range]:
        """`who` reports tokens start … end-1; which of these everybody has reported by now."""
        self._reported[who] = merged_range(self._reported.get(who, []), start, end)
        complete = [(start, end)]
        for each in everybody:
            theirs = self._reported.get(each, [])
            complete = [(max(a, c), min(b, d)) for a, b in complete for c, d in theirs if max(a, c) < min(b, d)]
        return complete
