"""The prefixes an engine holds: a snapshot for new readers, and the latest changes for those that follow.

The log is bounded and shared by all its readers, each of which keeps its own place in it. Who falls behind, or read
the log of an engine that has died since, starts again with the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.process import messages as m
from quire.kvcache.held_names import NAME_BYTES

_MOST_NAMES = 1 << 16
"""In the changes that are kept. The whole takes as much as the engine has blocks."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log: names one after the other."""

    sequence: int
    stored: bytes
    evicted: bytes
    cleared: bool

    @property
    def num_names(self) -> int:
        return 1 + (len(self.stored) + len(self.evicted)) // NAME_BYTES


class KVLog:
    def __init__(self) -> None:
        self.epoch = secrets.token_hex(8)
        """Of the engine that the log is about: another one has another."""
        self.sequence = 0
        """Of the last entry."""
        self.held: dict[bytes, None] = {}
        self.on_change: Callable[[Entry], None] | None = None
        """Told of every entry at once, for a reader in this process; an engine's death is an entry that clears."""
        self._entries: deque[Entry] = deque()
        self._num_names = 0
        self._changed = asyncio.Event()

    def start_over(self) -> None:
        """The engine has died, or another has started: nothing is held."""
        self.epoch = secrets.token_hex(8)
        self._entries.clear()
        self._num_names = 0
        self._take(Entry(self.sequence + 1, b"", b"", True))

    def take(self, message: m.KVChanges) -> None:
        """The engine says what has changed."""
        self._take(Entry(self.sequence + 1, message.stored, message.evicted, message.cleared))

    def _take(self, entry: Entry) -> None:
        self.sequence = entry.sequence
        if entry.cleared:
            self.held.clear()
        for name in names_of(entry.evicted):
            self.held.pop(name, None)
        self.held.update(dict.fromkeys(names_of(entry.stored)))
        self._entries.append(entry)
        self._num_names += entry.num_names
        while self._num_names > _MOST_NAMES and len(self._entries) > 1:
            self._num_names -= self._entries.popleft().num_names
        self._changed.set()
        self._changed = asyncio.Event()
        if self.on_change is not None:
            self.on_change(entry)

    def since(self, epoch: str, sequence: int) -> list[Entry] | None:
        """The entries after `sequence`; None where that is not known any more, and the whole is needed."""
        if epoch != self.epoch or sequence > self.sequence:
            return None
        if sequence == self.sequence:
            return []
        if not self._entries or self._entries[0].sequence > sequence + 1:
            return None
        return [entry for entry in self._entries if entry.sequence > sequence]

    async def wait(self, seconds: float) -> None:
        """Until there is something new, or so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)


class JoinedKVLog(KVLog):
    """What several engines behind one server hold: a name is held as long as one of them has it."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[bytes, set[int]] = {}

    def take_of(self, engine: int, entry: Entry) -> None:
        """Engine number `engine` has changed."""
        evicted = names_of(entry.evicted)
        if entry.cleared:
            evicted = [name for name, holders in self._holders.items() if engine in holders]
        gone = [name for name in evicted if self._leave(name, engine)]
        new = []
        for name in names_of(entry.stored):
            if name not in self._holders:
                new.append(name)
            self._holders.setdefault(name, set()).add(engine)
        if gone or new:
            self._take(Entry(self.sequence + 1, b"".join(new), b"".join(gone), False))

    def _leave(self, name: bytes, engine: int) -> bool:
        """Whether its last holder has gone."""
        holders = self._holders.get(name)
        if holders is None:
            return False
        holders.discard(engine)
        if holders:
            return False
        del self._holders[name]
        return True


def names_of(joined: bytes) -> list[bytes]:
    return [joined[place : place + NAME_BYTES] for place in range(0, len(joined), NAME_BYTES)]
