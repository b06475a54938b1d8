"""Remembers requests that were running when an engine died: who was there twice is not tried a third time for a while.

A request is known by a digest of its content, so that a client which sends it again and again cannot use up the
restarts. If a request of that content is served meanwhile, it is cleared: another one was to blame.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from quire.errors import QuarantinedError
from quire.scheduler.request import Request

DEATHS = 2
QUARANTINE_SECONDS = 300.0
_MOST = 4096


@dataclass(slots=True)
class _Suspect:
    deaths: int
    last: float


class Quarantine:
    def __init__(self, clock: Callable[[], float] = time.monotonic, deaths: int = DEATHS) -> None:
        self._clock, self._deaths = clock, deaths
        self._suspects: dict[bytes, _Suspect] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def check(self, content: bytes) -> None:
        """Raises QuarantinedError where it has been there too often."""
        suspect = self._suspects.get(content)
        if suspect is None or suspect.deaths < self._deaths:
            return
        left = suspect.last + QUARANTINE_SECONDS - self._clock()
        if left > 0:
            raise QuarantinedError(
                f"the engine died {suspect.deaths} times while a request with this content was running: it is not "
                f"tried again for {QUARANTINE_SECONDS:g} seconds", retry_after=left)
        del self._suspects[content]

    def died_with(self, contents: Collection[bytes]) -> None:
        """An engine has died while these were running."""
        now = self._clock()
        for key in [key for key, each in self._suspects.items() if each.last + QUARANTINE_SECONDS < now]:
            del self._suspects[key]
        for key in set(contents):
            suspect = self._suspects.setdefault(key, _Suspect(0, now))
            suspect.deaths += 1
            suspect.last = now
        while len(self._suspects) > _MOST:
            del self._suspects[next(iter(self._suspects))]

    def served(self, content: bytes) -> None:
        """It was served to its end, so it does no harm."""
        self._suspects.pop(content, None)


def content_of(request: Request) -> bytes:
    """The same for two requests of one key that ask for the same; ids, times and seeds do not count."""
    beams = None if request.beams is None else repr(request.beams.params)
    params = {name: value for name, value in request.params.to_dict().items() if name != "seed"}
    text = repr((request.tenant, request.prompt_token_ids, params, beams))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
