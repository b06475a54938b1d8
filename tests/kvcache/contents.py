"""What physical KV blocks contain, as bookkeeping sees it: a slot remembers the prefix it was written for.

The KV of a token depends on all the tokens before it and on the cache key, so a slot holds a fingerprint of
those. Reading a slot that holds another prefix's fingerprint is the bug that a paged cache must never have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

EMPTY = None


def fingerprints(key: bytes, tokens: Sequence[int]) -> list[int]:
    """One per position: of the key and of all tokens up to there."""
    value, chain = hash((key, "root")), []
    for token in tokens:
        value = hash((value, token))
        chain.append(value)
    return chain


@dataclass(eq=False)
class Names:
    """The slots that one submitted plan speaks of: (group, block, offset) → who uses it, and as which entry."""

    step: int
    users: dict[tuple[int, int, int], set[tuple[object, int]]] = field(default_factory=dict)

    def add(self, group: int, block: int, offset: int, owner: object, index: int) -> None:
        self.users.setdefault((group, block, offset), set()).add((owner, index))


class BlockContents:
    """The slots of every block of every group, and the names that plans in flight have on them."""

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None]) -> None:
        self.block_size = block_size
        self.windows = list(windows)
        self.slots: list[list[list[int | None]]] = [
            [[EMPTY] * block_size for _ in range(num_blocks)] for _ in windows]
        self.in_flight: deque[Names] = deque()

    def begin(self, step: int) -> Names:
        names = Names(step)
        self.in_flight.append(names)
        return names

    def retire(self, step: int) -> None:
        assert self.in_flight.popleft().step == step

    def copy(self, names: Names, group: int, source: int, target: int, owner: object, index: int,
             valid: int) -> None:
        """Copy a block for entry `index` of the owner's table; its first `valid` slots mean something."""
        for offset in range(min(valid, self.block_size)):
            self._nobody_else(names, group, target, offset, owner, index)
            # Plans are carried out in order: one made later may overwrite the source.
            names.add(group, target, offset, owner, index)
        self.slots[group][target] = list(self.slots[group][source])

    def run(self, names: Names, owner: object, tables: Sequence[Sequence[int]], chain: Sequence[int],
            start: int, end: int) -> None:
        """Write positions start … end-1, then let each of them read all that it can see."""
        for group, table in enumerate(tables):
            for position in range(start, end):
                index = position // self.block_size
                self._nobody_else(names, group, table[index], position % self.block_size, owner, index)
                self.slots[group][table[index]][position % self.block_size] = chain[position]
            self._read(names, group, owner, table, chain, start, end)

    def _read(self, names: Names, group: int, owner: object, table: Sequence[int], chain: Sequence[int],
              start: int, end: int) -> None:
        for position in self.visible(group, start, end):
            index = position // self.block_size
            block = table[index]
            assert block >= 0, f"position {position} is visible but has no block"
            held = self.slots[group][block][position % self.block_size]
            assert held == chain[position], f"position {position} reads another prefix out of block {block}"
            names.add(group, block, position % self.block_size, owner, index)

    def visible(self, group: int, start: int, end: int) -> Iterable[int]:
        window = self.windows[group]
        return range(0 if window is None else max(0, start - window + 1), end)

    def _nobody_else(self, own: Names, group: int, block: int, offset: int, owner: object, index: int) -> None:
        for names in self.in_flight:
            others = names.users.get((group, block, offset), set()) - {(owner, index)}
            # Within one plan copies come before the forward pass: reading and then writing a block is fine.
            assert names is own or not others, f"block {block} is written while step {names.step} names it"

    def full_prefix(self, group: int, block: int) -> int | None:
        """The fingerprint of the prefix that ends with this block."""
        return self.slots[group][block][-1]
