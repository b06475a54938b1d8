"""Which prefixes an engine's device holds, as changes since the last call: what an engine publishes to routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.kvcache.manager import KVCacheManager

NAME_BYTES = 16


class Changes(NamedTuple):
    """Names one after the other, 16 bytes each."""

    stored: bytes
    evicted: bytes
    cleared: bool
    """All that was held before is forgotten; `stored` is all there is."""


class HeldNames:
    """An observer of the cache. Of several groups of layers it follows the first that attends to everything: where one
    of its blocks is, so are its parents. (Where all groups have windows, the first.)"""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._group = next((place for place, group in enumerate(cache.groups) if group.window is None), 0)
        self._changes: dict[bytes, bool] = {}
        """By name: now held, or not any more. What came and went meanwhile is not in it."""
        self._cleared = False
        cache.events.observers.append(self)

    def stored(self, group: int, key: bytes, parent: bytes | None, block: int) -> None:
        if group == self._group:
            self._note(key, True)

    def evicted(self, group: int, key: bytes, block: int) -> None:
        if group == self._group:
            self._note(key, False)

    def finished(self, keys: Sequence[bytes]) -> None:
        """What a sequence leaves behind is held as before."""

    def cleared(self) -> None:
        self._cleared = True
        self._changes = {key: True for key in self._cache.pools[self._group].hashes if key is not None}

    def take(self) -> Changes | None:
        """What has changed since the last time, None if nothing has."""
        if not self._changes and not self._cleared:
            return None
        found = Changes(b"".join(key for key, held in self._changes.items() if held),
                        b"".join(key for key, held in self._changes.items() if not held), self._cleared)
        self._changes, self._cleared = {}, False
        return found

    def _note(self, key: bytes, held: bool) -> None:
        if self._changes.get(key) is (not held):
            del self._changes[key]
        elif held or not self._cleared:
            self._changes[key] = held
