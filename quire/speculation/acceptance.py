"""How likely a draft is to be accepted, learned from earlier drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_FORGET = 0.98
"""Factor on the weight of all earlier trials of a class at each new one: about the last 50 count."""
_BORROWED = 6.0
"""Weight of the prior, in trials: a fixed one for the engine, the engine's estimate for a sequence."""

_FORGET_STEP = 0.96
"""Factor on the weight of all earlier steps at each new one: about the last 25 count."""
_TRUSTED = 2.0
"""Weight, in steps, of the prior that what is expected comes true."""


class Odds:
    """Share of hits, with a prior and exponentially fading history."""

    __slots__ = ("_hits", "_tries")

    def __init__(self) -> None:
        self._hits = 0.0
        self._tries = 0.0

    def add(self, hit: bool) -> None:
        self._hits = _FORGET * self._hits + hit
        self._tries = _FORGET * self._tries + 1.0

    @property
    def tries(self) -> float:
        """Weight of all trials, after fading."""
        return self._tries

    def estimate(self, prior: float, borrowed: float = _BORROWED) -> float:
        return (self._hits + borrowed * prior) / (self._tries + borrowed)


_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Smallest evidence (tokens that matched) of each class."""
_EVIDENCE_PRIORS = (0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92)
_ALTERNATIVE = 0.2
"""Prior of the second alternative, as a share of the probability that the best one leaves."""
_CLASS_OF = [sum(step <= evidence for step in _STEPS) - 1 for evidence in range(_STEPS[-1] + 1)]


def evidence_class(evidence: int) -> int:
    """Class of a match of `evidence` tokens, at least one."""
    return _CLASS_OF[evidence] if evidence < len(_CLASS_OF) else len(_STEPS) - 1


class EvidenceOdds:
    """Acceptance of lookups by evidence, for one sequence, with the engine's estimate as the prior.

    Every output token is compared with what a lookup would have proposed there, so this learns without verifying
    any drafts.
    """

    __slots__ = ("_all", "_own", "_rank")

    def __init__(self, engine: EvidenceOdds | None = None, rank: int = 0) -> None:
        """`rank`: which alternative at a place these odds are for: 0 the best, 1 the second best, ..."""
        self._own = [Odds() for _ in _STEPS]
        self._all = engine
        self._rank = rank

    def add(self, evidence: int, hit: bool) -> None:
        self._own[evidence_class(evidence)].add(hit)
        if self._all is not None:
            self._all.add(evidence, hit)

    def estimate(self, evidence: int) -> float:
        return self._estimate(evidence_class(evidence))

    def _estimate(self, place: int) -> float:
        prior = self._prior(place) if self._all is None else self._all._estimate(place)
        return self._own[place].estimate(prior)

    def _prior(self, place: int) -> float:
        best = _EVIDENCE_PRIORS[place]
        return best if not self._rank else _ALTERNATIVE * (1.0 - best) / self._rank

    def chain(self, evidence: int, count: int, trust: float = 1.0) -> list[float]:
        """Probabilities that the first 1, 2, … `count` drafts are all accepted. `trust`: a factor on that of each."""
        chances, all_of_them = [], 1.0
        for i in range(count):
            all_of_them *= trust * self.estimate(evidence + i)
            chances.append(all_of_them)
        return chances


class PositionOdds:
    """Acceptance of a model's drafts by place in the chain, given that all drafts before were accepted."""

    __slots__ = ("_all", "_better_than", "_borrowed", "_own", "_prior")

    _ALTERNATIVES = 0.3

    def __init__(self, most: int, engine: PositionOdds | None = None, better_than: PositionOdds | None = None,
                 prior: float = 0.6, borrowed: float = _BORROWED) -> None:
        """`prior`: the estimate before any trial; `borrowed`: its weight. `better_than`: set where several alternatives
        are offered at a place: the odds of a single draft there. The prior is then that alternatives hit a share
        `_ALTERNATIVES` of its misses."""
        self._own = [Odds() for _ in range(most)]
        self._all = engine
        self._better_than = better_than
        self._prior, self._borrowed = prior, borrowed

    @property
    def tries(self) -> float:
        """Weight of the trials at the first place, after fading."""
        return self._own[0].tries

    def add(self, hits: Iterable[bool]) -> None:
        hits = list(hits)
        for odds, hit in zip(self._own, hits, strict=False):
            odds.add(hit)
        if self._all is not None:
            self._all.add(hits)

    def _estimate(self, place: int) -> float:
        if self._better_than is not None:
            one = self._better_than._estimate(place)
            prior = one + self._ALTERNATIVES * (1.0 - one)
        else:
            prior = self._prior if self._all is None else self._all._estimate(place)
        return self._own[place].estimate(prior, self._borrowed)

    def chain(self, count: int) -> list[float]:
        """Probabilities that the first 1, 2, … `count` drafts are all accepted."""
        chances, all_of_them = [], 1.0
        for place in range(count):
            all_of_them *= self._estimate(place)
            chances.append(all_of_them)
        return chances


class Trust:
    """What became of tokens that looked likely enough to be drafted, as a share of what was expected of them.

    Whoever chooses the likeliest drafts chooses those whose odds are too high. Sequences of one text come true or not
    together, so a step counts as one sequence, however many it has.
    """

    __slots__ = ("_expected", "_hits", "_of_step")

    def __init__(self) -> None:
        self._hits = self._expected = _TRUSTED
        self._of_step = [0.0, 0.0, 0.0]
        """Hits, expected hits and sequences of the step that is looked at."""

    def add(self, judged: Sequence[tuple[float, bool]]) -> None:
        """Tokens of one sequence in a step: how likely each looked, and whether it came true. They count together,
        since a step ends with the first that did not: their mean would say less of them than was expected."""
        step = self._of_step
        step[0] += sum(hit for _, hit in judged)
        step[1] += sum(expected for expected, _ in judged)
        step[2] += bool(judged)

    def next_step(self) -> None:
        hits, expected, count = self._of_step
        if count:
            self._hits = _FORGET_STEP * self._hits + (1.0 - _FORGET_STEP) * _TRUSTED + hits / count
            self._expected = _FORGET_STEP * self._expected + (1.0 - _FORGET_STEP) * _TRUSTED + expected / count
            self._of_step = [0.0, 0.0, 0.0]

    @property
    def share(self) -> float:
        """At most 1."""
        return min(1.0, self._hits / self._expected)
