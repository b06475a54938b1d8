"""Prompt lookup: what followed the last tokens where they stood before, in the request's own text."""

from __future__ import annotations

from collections.abc import Sequence

from quire.speculation.automaton import SuffixAutomaton
from quire.speculation.proposer import Proposal, Proposer, ProposerSource


class NgramProposer(Proposer):
    """Longest match over the sequence's own tokens, prompt and output alike."""

    def __init__(self, least_match: int) -> None:
        self._least = least_match
        self._seen = SuffixAutomaton()

    def extend(self, tokens: Sequence[int]) -> None:
        self._seen.extend(tokens)

    def propose(self, most: int) -> Proposal:
        length, place = self._seen.own_match()
        if length < self._least:
            return Proposal(())
        return Proposal(self._seen.continuation(place, most, repeat=True), length)


class NgramSource(ProposerSource):
    def __init__(self, least_match: int) -> None:
        self._least = least_match

    def open(self, tokens: Sequence[int], num_prompt_tokens: int, domain: object) -> Proposer:
        proposer = NgramProposer(self._least)
        proposer.extend(tokens)
        return proposer
