"""Which units are worth keeping: what writing costs against what they save, times how often such units were reused.

Reuse is learned from this engine's own traffic, apart for units that were used once, twice, and more often. As long as
nothing is known, half of them are taken to be wanted again, so that the first prompts are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from quire.kvpool.keys import UNIT_TOKENS
from quire.kvpool.rates import StoreRate

_KINDS = 3
"""Units used once, twice, and three times or more."""
_PRIOR = 8.0
"""Units' worth of trust in the odds that are assumed before anything is seen."""
_FIRST_ODDS = (0.5, 0.5, 0.7)
_FORGET = 0.999
"""Weight of an observation after each further one of its kind."""
_POOR = 0.5
"""Share of the odds of better units below which one does not take another's place."""
_WRITE_WEIGHT = 0.05
"""Weight of a second of writing, in the background, against a second of a request that waits for its first token."""


class ReuseOdds:
    """Follows the last `remembered` units that were seen, whether they were kept or not."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        """Uses of each, least recently used first."""
        self._again = [0.0] * _KINDS
        self._over = [0.0] * _KINDS

    def remember(self, count: int) -> None:
        """How many units to follow: about as long as they would stay in the store."""
        self._remembered = count

    def used(self, key: bytes) -> int:
        """A sequence has come to the end of the unit; how often that has happened."""
        uses = self._seen.pop(key, 0)
        if uses:
            self._count(uses, again=True)
        self._seen[key] = uses = uses + 1
        while len(self._seen) > self._remembered:
            _, forgotten = self._seen.popitem(last=False)
            self._count(forgotten, again=False)
        return uses

    def _count(self, uses: int, again: bool) -> None:
        kind = min(uses, _KINDS) - 1
        self._over[kind] = self._over[kind] * _FORGET + 1.0
        self._again[kind] = self._again[kind] * _FORGET + again

    def odds(self, uses: int) -> float:
        """That a unit used so often is used once more while it is remembered."""
        kind = min(uses, _KINDS) - 1
        return (self._again[kind] + _PRIOR * _FIRST_ODDS[kind]) / (self._over[kind] + _PRIOR)

    def poor(self, uses: int) -> bool:
        """Units used so often are used again much more rarely than those that were used once more."""
        return uses < _KINDS and self.odds(uses) < _POOR * self.odds(uses + 1)


class BenefitPublisher:
    """Keeps a unit where it will probably save more time than it costs to write."""

    def __init__(self, remembered: int, prefill_seconds: Callable[[int], float] | None) -> None:
        """`prefill_seconds`: what computing so many tokens takes here; None: everything is kept."""
        self.reuse = ReuseOdds(remembered)
        self._prefill_seconds = prefill_seconds
        self._last: tuple[bytes, int] = (b"", 0)
        self.num_kept = 0
        self.num_left = 0

    def wanted(self, key: bytes, num_bytes: int, rate: StoreRate, full: bool = False) -> bool:
        """`full`: keeping it takes the place of another unit."""
        # Several tiers ask about one use of a unit, one after the other.
        if self._last[0] != key:
            self._last = key, self.reuse.used(key)
        if self._prefill_seconds is None:
            return True
        fetch = rate.seconds(num_bytes)
        saved = self._prefill_seconds(UNIT_TOKENS) - fetch
        odds = self.reuse.odds(self._last[1])
        kept = odds * saved > _WRITE_WEIGHT * fetch and not (full and self.reuse.poor(self._last[1]))
        self.num_kept += kept
        self.num_left += not kept
        return kept
