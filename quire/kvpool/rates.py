"""How fast a store is, learned from what its reads and writes took: a latency and a bandwidth."""

from __future__ import annotations

from threading import Lock

_WEIGHT = 0.2
"""Of the newest observation."""


class StoreRate:
    """Seconds = latency + bytes / bandwidth, where the latency is that of lookups and the rest is observed.

    Before anything is observed it believes what it was told, so that the first read is tried.
    """

    def __init__(self, bytes_per_second: float = 1e9, latency: float = 1e-4) -> None:
        self.bytes_per_second = bytes_per_second
        self.latency = latency
        self.num_observed = 0
        self._mutex = Lock()

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A read or a write of so many bytes took so long."""
        with self._mutex:
            rate = num_bytes / max(seconds - self.latency, seconds / 10, 1e-9)
            weight = max(_WEIGHT, 1.0 / (1 + self.num_observed))
            # Averages of seconds per byte, not of rates: one fast read does not make up for a slow one.
            self.bytes_per_second = 1.0 / ((1 - weight) / self.bytes_per_second + weight / max(rate, 1.0))
            self.num_observed += 1

    def observe_latency(self, seconds: float) -> None:
        with self._mutex:
            self.latency += _WEIGHT * (seconds - self.latency)

    def seconds(self, num_bytes: int) -> float:
        return self.latency + num_bytes / self.bytes_per_second
