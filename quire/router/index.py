"""Who holds which prefix: by name of a block the servers that have it, as each of them says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class KVIndex:
    """Servers are small numbers, and those that hold a block are the bits of an integer: following a prompt block by
    block is one lookup and one `and` each, however many servers there are."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[bytes, int] = {}
        self._names: dict[int, set[bytes]] = {}
        self.num_blocks = 0
        """Over all servers."""
        self.num_dropped = 0
        """Blocks that there was no room for."""

    def held_by(self, server: int) -> int:
        return len(self._names.get(server, ()))

    def stored(self, server: int, names: Iterable[bytes]) -> None:
        """Of each server no more than its share is kept, so that one that says nonsense costs the others nothing."""
        mine = self._names.setdefault(server, set())
        share = max(1, self._max_blocks // len(self._names))
        bit = 1 << server
        for name in names:
            if name in mine:
                continue
            if len(mine) >= share or self.num_blocks >= self._max_blocks:
                self.num_dropped += 1
                continue
            mine.add(name)
            self.num_blocks += 1
            self._holders[name] = self._holders.get(name, 0) | bit

    def evicted(self, server: int, names: Iterable[bytes]) -> None:
        mine = self._names.get(server)
        if mine is not None:
            for name in names:
                if name in mine:
                    mine.discard(name)
                    self._remove(server, name)

    def cleared(self, server: int) -> None:
        """The server holds nothing, or is gone."""
        for name in self._names.pop(server, ()):
            self._remove(server, name)

    def _remove(self, server: int, name: bytes) -> None:
        self.num_blocks -= 1
        left = self._holders[name] & ~(1 << server)
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]

    def leading(self, names: Iterator[bytes], servers: Iterable[int]) -> dict[int, int]:
        """How many of the first blocks each of the servers holds; names are not made beyond the last that is held."""
        following = 0
        for server in servers:
            following |= 1 << server
        found: dict[int, int] = {}
        count = 0
        for name in names:
            still = following & self._holders.get(name, 0)
            if still != following:
                if count:
                    for server in _bits(following & ~still):
                        found[server] = count
                following = still
                if not following:
                    break
            count += 1
        if count:
            for server in _bits(following):
                found[server] = count
        return found


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
