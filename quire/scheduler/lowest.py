"""Which of many keys has the lowest rank, while ranks change: O(log n) per change."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

_FEW = 16
"""Outdated entries that the heap keeps in any case."""


class Lowest:
    """Ranks by key. A changed rank leaves its entry in the heap until it surfaces, or most entries are such."""

    def __init__(self) -> None:
        self._ranks: dict[str, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], str]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, key: str, rank: tuple[int, int]) -> None:
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks) + _FEW:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)

    def discard(self, key: str) -> None:
        self._ranks.pop(key, None)

    def first(self) -> str:
        """Only called when there is one."""
        while True:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank:
                return key
            heappop(self._heap)

    @property
    def lowest(self) -> tuple[int, int]:
        return self._ranks[self.first()]
