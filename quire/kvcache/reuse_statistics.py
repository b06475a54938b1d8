"""How soon are idle blocks used again? Learned online, by kind of block and by time since the last use."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import pairwise
from math import expm1, log2, sqrt
from zlib import crc32

# Ages are counted in blocks that became idle since, and told apart by powers of two of the pool's size: below
# a sixteenth of it order hardly matters, beyond 32 times it nothing is worth waiting for.
_YOUNGEST = 16
_NUM_EDGES = 10
_SAMPLED = 8
"""One key in so many is followed; a chain of blocks shares one fate, so little is lost."""
_HALF_LIFE = 8
"""What was seen this many pool sizes ago counts half."""
_PRIOR = 2.0
"""Reuses' worth of trust in what is assumed before anything is seen."""
_PROPORTIONAL = 8.0
"""Reuses' worth of trust in a kind's rate being the common curve over age times one factor of its own."""
_REUSES_PER_STEP = 16
"""Indices are told apart by an octave when so few reuses were seen, by half of one at 4 times as many, and so on."""
_FADE = 0.4
"""Assumed at first: the rate of reuse falls by this factor when the age doubles. So LRU is where we start."""

_CLOSED = -1


class Interval:
    """One idle time of one sampled prefix: open until it is used again, cached or not, or forgotten."""

    __slots__ = ("bucket", "key", "kind", "start")

    def __init__(self, key: bytes, kind: int, start: int) -> None:
        self.key = key
        self.kind = kind
        self.start = start
        self.bucket = 0


class ReuseStatistics:
    """Counts reuses and time at risk for every (kind, age), and turns them into an index for eviction.

    Follows a sample of prefixes through eviction and beyond, so that what is learned does not depend on what
    was kept. Holds at most 2 ** 5 / `_SAMPLED` = 4 intervals per block of the pool.
    """

    def __init__(self, num_blocks: int, num_kinds: int) -> None:
        youngest = max(2, num_blocks // _YOUNGEST)
        self.edges = [youngest << doubling for doubling in range(_NUM_EDGES)]
        self.num_buckets = len(self.edges) + 1
        self.num_kinds = num_kinds
        bounds = [0, *self.edges, 2 * self.edges[-1]]
        self._widths = [float(high - low) for low, high in pairwise(bounds)]
        cells = num_kinds * self.num_buckets
        self._reuses = [0.0] * cells
        self._at_risk = [0.0] * cells
        self._open = [0] * cells
        self._by_key: dict[bytes, Interval] = {}
        self._by_age: list[deque[Interval]] = [deque() for _ in self.edges]
        self._half_life = _HALF_LIFE * num_blocks
        self._advanced = 0

    def bucket(self, age: int) -> int:
        return bisect_right(self.edges, age)

    def begin(self, key: bytes, kind: int, now: int) -> Interval | None:
        """A block caching `key` has become idle; None when this key is not in the sample."""
        if crc32(key) % _SAMPLED:
            return None
        before = self._by_key.get(key)
        if before is not None:
            self.reused(before, now)
        interval = self._by_key[key] = Interval(key, kind, now)
        self._by_age[0].append(interval)
        self._open[kind * self.num_buckets] += 1
        return interval

    def reused(self, interval: Interval, now: int) -> None:
        """The prefix of `interval` is wanted again. Once closed, an interval counts no more."""
        if interval.bucket == _CLOSED:
            return
        first = interval.kind * self.num_buckets
        self._reuses[first + self.bucket(now - interval.start)] += 1.0
        self._close(interval)

    def _close(self, interval: Interval) -> None:
        self._open[interval.kind * self.num_buckets + interval.bucket] -= 1
        interval.bucket = _CLOSED
        del self._by_key[interval.key]

    def advance(self, now: int) -> None:
        """Let time pass: fade what was learned, add the time at risk, move open intervals to their age."""
        elapsed = now - self._advanced
        self._advanced = now
        keep = 0.5 ** (elapsed / self._half_life)
        self._reuses = [count * keep for count in self._reuses]
        self._at_risk = [time * keep + count * elapsed for time, count in zip(self._at_risk, self._open)]
        for bucket, edge in enumerate(self.edges):
            due = now - edge
            intervals = self._by_age[bucket]
            while intervals and intervals[0].start <= due:
                interval = intervals.popleft()
                if interval.bucket == _CLOSED:
                    continue
                if bucket + 1 == len(self.edges):
                    self._close(interval)
                    continue
                cell = interval.kind * self.num_buckets + bucket
                self._open[cell] -= 1
                self._open[cell + 1] += 1
                interval.bucket = bucket + 1
                self._by_age[bucket + 1].append(interval)

    def grades(self) -> list[int]:
        """The indices on a logarithmic scale with steps as wide as what is known is uncertain.

        So what differs by chance alone counts as equal, and is left to the policy's rule for equals. The
        error of a rate falls with the root of the reuses seen.
        """
        steps_per_octave = max(1.0, sqrt(sum(self._reuses) / _REUSES_PER_STEP))
        return [round(steps_per_octave * log2(index)) for index in self.indices()]

    def indices(self) -> list[float]:
        """For every kind and bucket, the most reuses per time that keeping such a block can bring.

        That is the Gittins index of the retention problem: over all times T to give up after, the greatest
        of P(reuse within T) / E[time it stays]. So a block is worth what comes after its owner's pause.
        """
        size = self.num_buckets
        pooled = self._pooled_rates()
        result: list[float] = []
        for first in range(0, self.num_kinds * size, size):
            reuses, at_risk = self._reuses[first : first + size], self._at_risk[first : first + size]
            expected = sum(time * rate for time, rate in zip(at_risk, pooled))
            factor = (sum(reuses) + _PRIOR) / (expected + _PRIOR)
            rates = [
                (count + _PROPORTIONAL) / (time + _PROPORTIONAL / (factor * rate))
                for count, time, rate in zip(reuses, at_risk, pooled)
            ]
            result += best_stopping_rates(rates, self._widths)
        return result

    def _pooled_rates(self) -> list[float]:
        """Rate of reuse at each age over all kinds, falling with age where nothing is known."""
        size = self.num_buckets
        rates: list[float] = []
        rate = 0.1 / self._widths[0]
        for i in range(size):
            reuses, at_risk = sum(self._reuses[i::size]), sum(self._at_risk[i::size])
            rate = (reuses + _PRIOR) / (at_risk + _PRIOR / rate)
            rates.append(rate)
            rate *= _FADE
        return rates


def best_stopping_rates(rates: list[float], widths: list[float]) -> list[float]:
    """From the start of each age bucket on, the greatest P(reuse) / E[time] over all ages to stop at.

    `rates[i]` is the hazard inside bucket i, `widths[i]` its length. Works backwards, gluing a bucket to the
    stretch behind it while that stretch is the better part: linear in the number of buckets.
    """
    result = [0.0] * len(rates)
    stretches: list[tuple[float, float, float]] = []
    for i in range(len(rates) - 1, -1, -1):
        reuse = -expm1(-rates[i] * widths[i])
        time = reuse / rates[i]
        while stretches and stretches[-1][0] > reuse / time:
            _, more_reuse, more_time = stretches.pop()
            survive = 1.0 - reuse
            reuse += survive * more_reuse
            time += survive * more_time
        result[i] = reuse / time
        stretches.append((result[i], reuse, time))
    return result
