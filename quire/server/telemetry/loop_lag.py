"""How late the server's event loop is: a timer that is due every 10 ms, and by how much it missed that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TICK_SECONDS = 0.01
_WINDOW_SECONDS = 30.0


class LoopLag:
    """`largest` covers the last 30 to 60 seconds, so that a scrape now and then misses nothing and old news end."""

    def __init__(self, observe: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._observe, self._clock = observe, clock
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._window_ends = 0.0
        self._before = self._now = 0.0
        """The largest lags of the last window and of this one."""

    @property
    def largest(self) -> float:
        self._turn_windows(self._clock())
        return max(self._before, self._now)

    def start(self) -> None:
        """On the running event loop, until `close`."""
        self._window_ends = self._clock() + _WINDOW_SECONDS
        self._wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._due = self._clock() + _TICK_SECONDS
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        lag = max(0.0, now - self._due)
        self._observe(lag)
        self._turn_windows(now)
        self._now = max(self._now, lag)
        self._wait()

    def _turn_windows(self, now: float) -> None:
        if now >= self._window_ends:
            stale = now >= self._window_ends + _WINDOW_SECONDS
            self._before, self._now = 0.0 if stale else self._now, 0.0
            self._window_ends = now + _WINDOW_SECONDS
