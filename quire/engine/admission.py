"""Who may wait for the engine: a bound on requests and on prompt tokens, and a guess when there will be room."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

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
        self._left: deque[tuple[float, int]] = deque()
        """When requests left the queue, and their tokens."""

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

    # ---- what happens to requests

    def sent(self, handle: int, prompt_tokens: int, rows: int) -> None:
        self._fresh[handle] = (prompt_tokens, rows)
        self._rows_wanted += rows
        self._tokens += prompt_tokens

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
        for each in (self._fresh, self._passed_over, self._running):
            each.clear()
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
        now = self._clock()
        self._left.append((now, found[0]))
        while self._left[0][0] < now - _WINDOW_SECONDS:
            self._left.popleft()
        return found[1]

    def _estimate(self, requests: int, tokens: int) -> float:
        """Seconds until the queue has moved by so much, at the pace of the last half minute."""
        now = self._clock()
        recent = [(when, size) for when, size in self._left if when >= now - _WINDOW_SECONDS]
        if not recent:
            return _BLIND_WAIT
        span = max(now - recent[0][0], 0.1)
        by_requests = requests * span / len(recent)
        by_tokens = tokens * span / max(1, sum(size for _, size in recent))
        return float(min(_LONGEST_WAIT, max(1, math.ceil(max(by_requests, by_tokens)))))
