"""What steps of n tokens take here, as measured: the other half of whether a draft pays."""

from __future__ import annotations

from bisect import bisect_left, insort

_FOLLOW_MACHINE = 0.2
_FOLLOW_SHAPE = 0.08
"""How far a measurement moves the common factor of all sizes, and how far that of its own size."""
_YOUNG = 4
"""Measurements of a size up to which a shorter one says what it costs, not that the machine is less busy: those before
may have warmed something up."""
_OUTLIER = 2.0
"""Times the belief beyond which a measurement moves it no further: the machine was busy with something else."""


class StepCosts:
    """Seconds by number of tokens: a table, since the first few rows are not linear in it, times a common factor.

    The factor follows what concerns every step alike (a busy machine, longer contexts) and does so fast;
    what one size costs against another changes slowly. Between measured sizes it interpolates; a larger
    step is never believed to be cheaper than a smaller one.
    """

    def __init__(self, grows_like: StepCosts | None = None) -> None:
        """`grows_like`: beyond the largest measured size these costs are believed to grow as those do."""
        self._sizes: list[int] = []
        self._shape: dict[int, float] = {}
        self._tries: dict[int, int] = {}
        self._factor = 1.0
        self._grows_like = grows_like

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    @property
    def factor(self) -> float:
        """How much longer everything takes than when it was measured first."""
        return self._factor

    def observe(self, size: int, seconds: float) -> None:
        size = _rounded(size)
        if size not in self._shape:
            insort(self._sizes, size)
            self._shape[size] = seconds / self._factor
            self._tries[size] = 1
            return
        believed = self._factor * self._shape[size]
        self._tries[size] += 1
        if self._tries[size] <= _YOUNG and seconds < believed:
            self._shape[size] *= seconds / believed
            return
        ratio = min(max(seconds / believed, 1 / _OUTLIER), _OUTLIER)
        self._factor *= ratio**_FOLLOW_MACHINE
        self._shape[size] *= ratio**_FOLLOW_SHAPE

    def follow(self, ratio: float) -> None:
        """A step that was not of these sizes alone took `ratio` times what was believed: so, perhaps, will others."""
        self._factor *= min(max(ratio, 1 / _OUTLIER), _OUTLIER) ** _FOLLOW_MACHINE

    def estimate(self, size: float) -> float:
        """Seconds of a step of `size` tokens, on average; 0 before anything was measured."""
        sizes, shape = self._sizes, self._shape
        if not sizes:
            return 0.0
        place = bisect_left(sizes, size)
        if place < len(sizes) and sizes[place] == size:
            return self._factor * shape[sizes[place]]
        if place == 0:
            return self._factor * shape[sizes[0]]
        low = sizes[place - 1]
        if place == len(sizes):
            if self._grows_like is not None and self._grows_like.known:
                return self._factor * shape[low] * self._grows_like.estimate(size) / self._grows_like.estimate(low)
            return self._factor * (shape[low] + (size - low) * self._slope())
        high = sizes[place]
        share = (size - low) / (high - low)
        return self._factor * (shape[low] + share * max(0.0, shape[high] - shape[low]))

    def _slope(self) -> float:
        """What a token more costs beyond the largest measured size."""
        first, last = self._sizes[0], self._sizes[-1]
        if first == last:
            return self._shape[last] / last
        return max(0.0, self._shape[last] - self._shape[first]) / (last - first)


def _rounded(size: int) -> int:
    """Large steps of nearly one size are one size."""
    if size <= 16:
        return size
    step = 8 if size <= 64 else 32
    return -(-size // step) * step
