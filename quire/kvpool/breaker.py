"""A circuit breaker: a store that fails or hangs is left alone for a while, then tried with one question."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

_FAILURES = 3
"""In a row, until the circuit opens."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


class CircuitBreaker:
    """A circuit breaker. Closed: every call may pass. Open: none, for a pause that doubles each time; then one trial
    call decides."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = Lock()
        self._failures = 0
        self._pause = 0.0
        self._closed_after: float | None = None
        """While open: when the next trial is allowed. None: closed."""
        self._trying = False
        self.num_opened = 0

    @property
    def open(self) -> bool:
        return self._closed_after is not None

    def may_ask(self) -> bool:
        """Whether to ask now. Who was told yes reports `succeeded` or `failed`."""
        with self._mutex:
            if self._closed_after is None:
                return True
            now = self._clock()
            if now < self._closed_after:
                return False
            # Should we never hear what became of it, another may try after the same pause.
            self._trying, self._closed_after = True, now + self._pause
            return True

    def succeeded(self) -> None:
        with self._mutex:
            self._failures, self._pause, self._closed_after, self._trying = 0, 0.0, None, False

    def failed(self) -> None:
        with self._mutex:
            self._failures += 1
            if self._failures < _FAILURES and self._closed_after is None:
                return
            if self._closed_after is not None and not self._trying:
                return  # a call from before it opened
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause) if self._pause else _FIRST_PAUSE
            self._closed_after = self._clock() + self._pause
            self._trying = False
            self.num_opened += 1
