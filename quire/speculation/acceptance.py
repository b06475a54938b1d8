"""How likely a draft is to be accepted, learned from what became of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable

_FORGET = 0.98
"""Weight of a trial after each further one in its class: about the last 50 count."""
_BORROWED = 6.0
"""Trials that a class's prior, or the engine's experience for a sequence, is worth."""


class Odds:
    """Share of successes, with forgetting and a prior."""

    __slots__ = ("_hits", "_tries")

    def __init__(self) -> None:
        self._hits = 0.0
        self._tries = 0.0

    def add(self, hit: bool) -> None:
        self._hits = _FORGET * self._hits + hit
        self._tries = _FORGET * self._tries + 1.0

    @property
    def tries(self) -> float:
        """That still count."""
        return self._tries

    def estimate(self, prior: float) -> float:
        return (self._hits + _BORROWED * prior) / (self._tries + _BORROWED)


_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Least evidence of each class."""
_EVIDENCE_PRIORS = (0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92)
_ALTERNATIVE = 0.2
"""Of what the best alternative leaves, what the second is believed to have."""
_CLASS_OF = [sum(step <= evidence for step in _STEPS) - 1 for evidence in range(_STEPS[-1] + 1)]


def evidence_class(evidence: int) -> int:
    """Class of a match of so many tokens, at least one."""
    return _CLASS_OF[evidence] if evidence < len(_CLASS_OF) else len(_STEPS) - 1


class EvidenceOdds:
    """Acceptance by strength of evidence: of one sequence, leaning on the whole engine's while it is young.

    A lookup says what would have been proposed at every token, whether that was used or not, so this
    learns without a step being spent on it.
    """

    __slots__ = ("_all", "_own", "_rank")

    def __init__(self, engine: EvidenceOdds | None = None, rank: int = 0) -> None:
        """`rank`: of the alternatives at one place these are the odds of the best (0), the second best (1), ..."""
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

    def chain(self, evidence: int, count: int) -> list[float]:
        """Probabilities that the first 1, 2, … `count` drafts are all accepted."""
        chances, all_of_them = [], 1.0
        for i in range(count):
            all_of_them *= self.estimate(evidence + i)
            chances.append(all_of_them)
        return chances


class PositionOdds:
    """Acceptance by place in the draft, given that all before it were accepted: for drafts of a model."""

    __slots__ = ("_all", "_better_than", "_own", "_prior")

    _ALTERNATIVES = 0.3

    def __init__(self, most: int, engine: PositionOdds | None = None, better_than: PositionOdds | None = None,
                 prior: float = 0.6) -> None:
        """`prior`: what is believed before anything was tried.
        `better_than`: the odds of one draft at a place, where these are those of several alternatives; they are
        believed to hit that share `_ALTERNATIVES` of what it misses, until they have been tried."""
        self._own = [Odds() for _ in range(most)]
        self._all = engine
        self._better_than = better_than
        self._prior = prior

    @property
    def tries(self) -> float:
        """Of drafts at the first place."""
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
        return self._own[place].estimate(prior)

    def chain(self, count: int) -> list[float]:
        """Chances that the first 1, 2, … `count` all hit."""
        chances, all_of_them = [], 1.0
        for place in range(count):
            all_of_them *= self._estimate(place)
            chances.append(all_of_them)
        return chances
