"""Who may wait for the engine: a bound on requests and on prompt tokens, and a guess when there will be room.

A full queue is shared fairly: a tenant with less in it takes the place of the one with most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.engine.front.queue_shares import Departures, Heaviest, Share
from quire.errors import QueueFullError

_WINDOW_SECONDS = 30.0
_LONGEST_WAIT = 60.0
_BLIND_WAIT = 5.0
"""The guess while nothing has left the queue lately."""


class Admission:
    """Counts requests from the moment they are sent until the engine has begun with them.

    A request that the engine has not looked at yet does not wait while there are rows for it and nobody else waits:
    a burst that an idle engine takes at once fills no queue.
    """

    def __init__(self, max_requests: int, max_tokens: int, max_num_seqs: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests, self._max_tokens, self._max_num_seqs = max_requests, max_tokens, max_num_seqs
        self._clock = clock
        self._fresh: dict[int, tuple[int, int]] = {}
        """Prompt tokens and rows of each that was sent and is not known to be taken in, by handle, in order."""
        self._passed_over: dict[int, tuple[int, int]] = {}
        """The same of those that the engine has seen and not begun with."""
        self._running: dict[int, int] = {}
        """Rows of those that it has begun with."""
        self._rows_used = 0
        self._rows_wanted = 0
        """Of the fresh ones."""
        self._tokens = 0
        """Of the fresh ones and of those passed over."""
        self._tenants: dict[int, str | None] = {}
        """Of all these, by handle."""
        self._shares: dict[str | None, Share] = {}
        """What each tenant has in the queue."""
        self._most_requests, self._most_tokens = Heaviest(), Heaviest()
        self._departures = Departures(_WINDOW_SECONDS)

    @property
    def waiting(self) -> tuple[int, int]:
        """Requests, and their prompt tokens, that wait as far as one can tell from here."""
        requests, tokens = len(self._passed_over) + len(self._fresh), self._tokens
        if self._passed_over:
            return requests, tokens
        free = self._max_num_seqs - self._rows_used
        for prompt, rows in self._fresh.values():
            free -= rows
            if free < 0:
                break
            requests, tokens = requests - 1, tokens - prompt
        return requests, tokens

    def check(self, prompt_tokens: int, rows: int) -> None:
        """Raises QueueFullError if one more would be too many."""
        if not self._passed_over and self._rows_used + self._rows_wanted + rows <= self._max_num_seqs:
            return
        requests, tokens = self.waiting
        if requests + 1 > self._max_requests:
            raise QueueFullError(
                f"{requests} requests are waiting already (max_waiting_requests is {self._max_requests}): try again "
                "later", self._estimate(requests + 1 - self._max_requests, 0))
        if requests and tokens + prompt_tokens > self._max_tokens:
            raise QueueFullError(
                f"{tokens} prompt tokens are waiting already, and this request has {prompt_tokens} more "
                f"(max_waiting_tokens is {self._max_tokens}): try again later",
                self._estimate(0, tokens + prompt_tokens - self._max_tokens))

    def displaced_by(self, tenant: str | None, prompt_tokens: int) -> list[int]:
        """Who must leave a full queue for a tenant that has less in it: the newest of the tenant that has most, as
        long as that one keeps no less than the other gets. Nobody where that makes no room."""
        requests, tokens = self.waiting
        too_many = requests + 1 - self._max_requests
        too_large = tokens + prompt_tokens - self._max_tokens
        by_requests = too_many > 0
        heaviest = (self._most_requests if by_requests else self._most_tokens).top(default=tenant)
        if heaviest == tenant:
            return []
        own, theirs = self._shares.get(tenant, Share()), self._shares[heaviest]
        kept_requests, kept_tokens = len(theirs.sizes), theirs.tokens
        found: list[int] = []
        for handle, size in reversed(theirs.sizes.items()):
            if too_many <= 0 and too_large <= 0:
                return found
            kept_requests, kept_tokens = kept_requests - 1, kept_tokens - size
            if kept_requests <= len(own.sizes) if by_requests else kept_tokens < own.tokens + prompt_tokens:
                return []
            found.append(handle)
            too_many, too_large = too_many - 1, too_large - size
        return found if too_many <= 0 and too_large <= 0 else []

    # ---- what happens to requests

    def sent(self, handle: int, prompt_tokens: int, rows: int, tenant: str | None = None) -> None:
        self._fresh[handle] = (prompt_tokens, rows)
        self._rows_wanted += rows
        self._tokens += prompt_tokens
        self._tenants[handle] = tenant
        share = self._shares.setdefault(tenant, Share())
        share.sizes[handle] = prompt_tokens
        share.tokens += prompt_tokens
        self._weigh(tenant, share)

    def started(self, handle: int) -> None:
        """The engine has begun with it."""
        found = self._leave(handle)
        if found is not None:
            self._running[handle] = found
            self._rows_used += found

    def taken(self, handle: int) -> None:
        """The engine has planned a step knowing all requests up to this one: who has not started was passed over."""
        while self._fresh:
            first = next(iter(self._fresh))
            if first > handle:
                return
            self._passed_over[first] = found = self._fresh.pop(first)
            self._rows_wanted -= found[1]

    def ended(self, handle: int) -> None:
        self._leave(handle)
        self._rows_used -= self._running.pop(handle, 0)

    def clear(self) -> None:
        """The engine is gone, and everyone with it."""
        for each in (self._fresh, self._passed_over, self._running, self._tenants, self._shares):
            each.clear()
        self._most_requests, self._most_tokens = Heaviest(), Heaviest()
        self._rows_used = self._rows_wanted = self._tokens = 0

    def _leave(self, handle: int) -> int | None:
        """Out of the queue; the rows that it wants, if it was there."""
        found = self._fresh.pop(handle, None)
        if found is not None:
            self._rows_wanted -= found[1]
        else:
            found = self._passed_over.pop(handle, None)
        if found is None:
            return None
        self._tokens -= found[0]
        tenant = self._tenants.pop(handle)
        share = self._shares[tenant]
        del share.sizes[handle]
        share.tokens -= found[0]
        self._weigh(tenant, share)
        if not share.sizes:
            del self._shares[tenant]
        self._departures.add(self._clock(), found[0])
        return found[1]

    def _weigh(self, tenant: str | None, share: Share) -> None:
        self._most_requests.set(tenant, len(share.sizes))
        self._most_tokens.set(tenant, share.tokens if share.sizes else 0)

    def _estimate(self, requests: int, tokens: int) -> float:
        """Seconds until the queue has moved by so much, at the pace of the last half minute."""
        now = self._clock()
        recent = self._departures
        recent.expire(now)
        if not len(recent):
            return _BLIND_WAIT
        span = max(now - recent.first, 0.1)
        by_requests = requests * span / len(recent)
        by_tokens = tokens * span / max(1, recent.tokens)
        return float(min(_LONGEST_WAIT, max(1, math.ceil(max(by_requests, by_tokens)))))
