"""Numbers for units: tiers and transfers speak of blocks by number, stores know units by name."""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock

_REMEMBERED = 1 << 16
"""Units without a holder keep their number while there are no more than this."""


class UnitNumbers:
    """A place is a block inside a unit: number of the unit times blocks per unit, plus the block's index in it."""

    def __init__(self, blocks_per_unit: int, remembered: int = _REMEMBERED) -> None:
        self.blocks_per_unit = blocks_per_unit
        self._remembered = remembered
        self._mutex = Lock()
        self._numbers: dict[bytes, int] = {}
        self._names: OrderedDict[int, bytes] = OrderedDict()
        self._next = 0
        self.holders: Counter[int] = Counter()
        """By place; changed by the thread that plans."""
        self._held: Counter[int] = Counter()
        """By unit."""

    def places(self, name: bytes) -> range:
        """Of all blocks of a unit."""
        with self._mutex:
            number = self._numbers.get(name)
            if number is None:
                number = self._next
                self._next += 1
                self._numbers[name] = number
                self._names[number] = name
                self._prune()
            else:
                self._names.move_to_end(number)
        first = number * self.blocks_per_unit
        return range(first, first + self.blocks_per_unit)

    def name(self, place: int) -> bytes | None:
        """The unit that a place is in; None if its number was forgotten."""
        with self._mutex:
            return self._names.get(place // self.blocks_per_unit)

    def hold(self, place: int) -> None:
        with self._mutex:
            self.holders[place] += 1
            self._held[place // self.blocks_per_unit] += 1

    def let_go(self, place: int) -> None:
        with self._mutex:
            unit = place // self.blocks_per_unit
            for counts, key in ((self.holders, place), (self._held, unit)):
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]

    def _prune(self) -> None:
        looked = 0
        while len(self._names) > self._remembered and looked < 8:
            looked += 1
            number, name = self._names.popitem(last=False)
            if number in self._held:
                self._names[number] = name
            else:
                del self._numbers[name]

    def clear(self) -> None:
        """No unit is held, and no transfer is under way."""
        with self._mutex:
            self.holders.clear()
            self._held.clear()
