"""Measured time of a step of n tokens, which with acceptance decides whether a draft pays."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

_FOLLOW_MACHINE = 0.2
_FOLLOW_SHAPE = 0.08
"""Exponents by which one measurement moves the factor common to all sizes, and the entry of its own size."""
_YOUNG = 4
"""Among the first so many measurements of a size a shorter one replaces its entry, since earlier ones may have included
warm-up; later ones move the factors."""
_OUTLIER = 2.0
"""Clamp on measured / expected time: beyond it the machine was busy with something else."""
_FOLLOW_CORRECTION = 0.3
"""Exponent by which one measurement moves a correction."""
_FADE = 0.998
"""Exponent of a correction at each step of another kind: half is gone after 350. A slow moment is no verdict."""


class StepCosts:
    """Seconds by number of tokens: a table (the first few rows are not linear) times a common factor.

    The factor follows fast what affects every step alike (a busy machine, longer contexts); the entries change slowly.
    Between measured sizes it interpolates, and a larger step is never estimated cheaper than a smaller one.

    Large sizes share entries. A step between two of them says something of both, or, where steps are padded, of the
    larger one alone.
    """

    def __init__(self, grows_like: StepCosts | None = None, padded: bool = False) -> None:
        """`grows_like`: beyond the largest measured size, estimates grow in proportion to these."""
        self._padded = padded
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
        """Current time of a step relative to the first measurements."""
        return self._factor

    def observe(self, size: int, seconds: float) -> None:
        entry = _rounded(size)
        if entry != size and not self._padded:
            if not self._sizes or self._sizes[0] > size:
                low = entry - _grid(size)
                self._enter(low, seconds * low / size)
            self._observe_between(size, entry, seconds)
            return
        size = entry
        if not self._tries.get(size):
            self._enter(size, seconds)
            return
        believed = self._factor * self._shape[size]
        self._tries[size] += 1
        if self._tries[size] <= _YOUNG and seconds < believed:
            self._shape[size] *= seconds / believed
            return
        ratio = min(max(seconds / believed, 1 / _OUTLIER), _OUTLIER)
        self._factor *= ratio**_FOLLOW_MACHINE
        self._shape[size] *= ratio**_FOLLOW_SHAPE

    def _enter(self, size: int, seconds: float) -> None:
        if size not in self._shape:
            insort(self._sizes, size)
        self._shape[size] = seconds / self._factor
        self._tries[size] = 1

    def _observe_between(self, size: int, high: int, seconds: float) -> None:
        """A step of `size` tokens, between two entries; `high` may not be there yet, or be an estimate (no tries)."""
        low = self._sizes[bisect_left(self._sizes, size) - 1]
        share = (size - low) / (high - low)
        if high not in self._shape:
            # What it takes as things stand: one step of a size that may be near the lower entry says little more.
            self._enter(high, self.estimate(high))
            self._tries[high] = 0
        believed = self.estimate(size)
        ratio = min(max(seconds / believed, 1 / _OUTLIER), _OUTLIER)
        self._factor *= ratio**_FOLLOW_MACHINE
        self._shape[low] *= ratio ** (_FOLLOW_SHAPE * (1.0 - share))
        self._shape[high] *= ratio ** (_FOLLOW_SHAPE * share)

    def least_chance(self, size: int, most: int, gain: float) -> float:
        """Of `size` sequences with up to `most` drafts in all: the least mean chance at which any number of drafts
        would give `gain` times the tokens per second. Between two entries the ends are the extremes."""
        plain = self.estimate(size)
        ends = [each for each in self._sizes[bisect_right(self._sizes, size) :] if each < size + most]
        return min(size * (gain * self.estimate(each) / plain - 1.0) / (each - size)
                   for each in (size + 1, *ends, size + most))

    def follow(self, ratio: float) -> None:
        """Move the common factor: a step that was not of these sizes alone took `ratio` times its estimate."""
        self._factor *= min(max(ratio, 1 / _OUTLIER), _OUTLIER) ** _FOLLOW_MACHINE

    def estimate(self, size: float) -> float:
        """Expected seconds of a step of `size` tokens; 0 before anything was measured."""
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
        """Cost of one more token beyond the largest measured size: the mean from half of that size on, or from the
        smallest if that is more. A few tokens may cost next to nothing where many cost their full share."""
        last, half = self._sizes[-1], self._sizes[bisect_right(self._sizes, self._sizes[-1] // 2) - 1]
        earlier = {size for size in (self._sizes[0], half) if size < last}
        if not earlier:
            return self._shape[last] / last
        return max(0.0, *((self._shape[last] - self._shape[size]) / (last - size) for size in earlier))


class Correction:
    """A factor on what steps of some kind are estimated to take, beside those that the estimate was learned from."""

    def __init__(self) -> None:
        self.factor = 1.0

    def follow(self, ratio: float) -> None:
        """A step took `ratio` times its estimate without the factor."""
        self.factor *= min(max(ratio / self.factor, 1 / _OUTLIER), _OUTLIER) ** _FOLLOW_CORRECTION

    def fade(self, steps: int = 1) -> None:
        """Steps of another kind, which say nothing of these."""
        self.factor **= _FADE**steps


def _rounded(size: int) -> int:
    """Round large sizes up, so that similar ones share an entry."""
    step = _grid(size)
    return -(-size // step) * step


def _grid(size: int) -> int:
    """How far apart the entries round `size` are."""
    return 1 if size <= 16 else 8 if size <= 64 else 32
