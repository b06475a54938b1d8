"""Decides, step by step, which beams go on and which are complete; knows scores and tokens, and no KV.

The rules are those of transformers' `generate(num_beams=…)`, so that the same beams come out.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from quire.sampling.params import BeamSearchParams

Candidate = tuple[int, float]
"""Token and log-probability."""


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The beam at place `parent` of those now running goes on with `token`."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete beam: its output, the sum of its log-probabilities, and that after the length penalty."""

    tokens: list[int]
    cumulative_logprob: float
    score: float
    ended: bool
    """By an end-of-sequence token, not by length."""


@dataclass(frozen=True, slots=True)
class _Beam:
    """A running beam: its last token and the beam that it continues, so that forks share what they have in common."""

    before: _Beam | None
    token: int
    score: float
    length: int

    def tokens(self) -> list[int]:
        found: list[int] = []
        beam: _Beam | None = self
        while beam is not None and beam.before is not None:
            found.append(beam.token)
            beam = beam.before
        return found[::-1]


class BeamSearch:
    """One request's search. Beams are numbered by their place; at first there is one, the prompt."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self.params = params
        self.width = params.beam_width
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.num_candidates = max(2, 1 + len(self.eos_token_ids)) * self.width
        """Likeliest next tokens that each beam reports: enough for `width` to go on whatever ends."""
        self.done = False
        self._running = [_Beam(None, -1, 0.0, 0)]
        self._complete: list[Hypothesis] = []
        self._reported: dict[int, list[Candidate]] = {}

    # ---- what comes in

    def report(self, place: int, candidates: list[Candidate]) -> bool:
        """Take what follows one beam; true when all have reported."""
        self._reported[place] = candidates
        return len(self._reported) == len(self._running)

    def forget_reports(self) -> None:
        """The beams lost their place and will report again."""
        self._reported = {}

    # ---- what is decided

    def advance(self, max_tokens: int) -> list[BeamStep]:
        """With all reports in: who goes on. Afterwards either `done` holds or `width` choices do.

        `max_tokens`: the longest output, which ends every beam that reaches it.
        """
        length = self._running[0].length + 1
        best = self._best_candidates()
        ends = [choice.token in self.eos_token_ids or length >= max_tokens for choice in best]
        # Only the best `width` may complete; the others are there so that enough can go on.
        for choice, end in list(zip(best, ends, strict=True))[: self.width]:
            if end:
                self._keep(choice, length)
        going = [choice for choice, end in zip(best, ends, strict=True) if not end][: self.width]
        self._reported = {}
        self.done = not going or self._decided(going[0].score, length, max_tokens)
        self._running = [_Beam(self._running[c.parent], c.token, c.score, length) for c in going]
        return [] if self.done else going

    def _best_candidates(self) -> list[BeamStep]:
        """Of all continuations of all beams, best first; ties by beam, then by token order as reported."""
        every = (BeamStep(place, token, beam.score + logprob)
                 for place, beam in enumerate(self._running)
                 for token, logprob in self._reported[place])
        return heapq.nlargest(self.num_candidates, every, key=lambda choice: choice.score)

    def _keep(self, choice: BeamStep, length: int) -> None:
        tokens = [*self._running[choice.parent].tokens(), choice.token]
        score = choice.score / length**self.params.length_penalty
        self._complete.append(
            Hypothesis(tokens, choice.score, score, ended=choice.token in self.eos_token_ids))
        self._complete.sort(key=lambda hypothesis: -hypothesis.score)
        del self._complete[self.width :]

    def _decided(self, best_running: float, length: int, max_tokens: int) -> bool:
        """Are there enough complete beams, and no hope that a running one will beat the worst of them?"""
        if len(self._complete) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        reach = max_tokens if self.params.early_stopping == "never" and penalty > 0.0 else length
        return bool(best_running / reach**penalty <= self._complete[-1].score)

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """Complete beams, best first."""
        return self._complete
