"""A bounded number of places that the keys share: a full house makes room for a key that has less in it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from quire.server.api_error import ApiError


class Place:
    """One place, while a request holds it."""

    __slots__ = ("lost", "on_lost", "tenant")

    def __init__(self, tenant: str | None) -> None:
        self.tenant = tenant
        self.lost = False
        """Set when a key with fewer places needs it: the holder must end."""
        self.on_lost: Callable[[], None] | None = None


class Places:
    def __init__(self, number: int, full: str, code: str) -> None:
        self._number, self._full, self._code = number, full, code
        self._taken: list[Place] = []

    @contextlib.contextmanager
    def take(self, tenant: str | None) -> Iterator[Place]:
        """Raises 429 where all are taken and no other key has two more than this one."""
        if len(self._taken) >= self._number:
            self._make_room(tenant)
        place = Place(tenant)
        self._taken.append(place)
        try:
            yield place
        finally:
            if place in self._taken:
                self._taken.remove(place)

    def _make_room(self, tenant: str | None) -> None:
        counts = Counter(place.tenant for place in self._taken)
        heaviest = max(counts, key=lambda name: counts[name])
        if counts[heaviest] < counts[tenant] + 2:
            raise ApiError(429, self._full, code=self._code, retry_after=5.0)
        last = next(place for place in reversed(self._taken) if place.tenant == heaviest)
        self._taken.remove(last)
        last.lost = True
        if last.on_lost is not None:
            last.on_lost()
