"""Prompt lookup: proposes what followed the last tokens at their earlier occurrence in the same request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from quire.speculation.automaton import SuffixAutomaton
from quire.speculation.proposer import SHORT, Proposal, Proposer, ProposerSource


class NgramProposer(Proposer):
    """Longest match of the last tokens in the sequence's own prompt and output."""

    def __init__(self, least_match: int) -> None:
        self._least = least_match
        self._seen = SuffixAutomaton()
        self._noted = array("i")
        """Tokens that `catch_up` has yet to add to the automaton, from `_next` on."""
        self._next = 0

    def extend(self, tokens: Sequence[int]) -> None:
        if len(tokens) <= SHORT and not self._noted:
            self._seen.extend(tokens)
        else:
            self._noted.extend(tokens)

    def catch_up(self, most: int) -> int:
        taken, cost = self._seen.take(self._noted, self._next, most)
        self._next += taken
        if self._next == len(self._noted):
            self._noted, self._next = array("i"), 0
        return cost

    def propose(self, most: int) -> Proposal:
        if self._noted:
            return Proposal(())
        length, place = self._seen.own_match()
        if length < self._least:
            return Proposal(())
        return Proposal(self._seen.continuation(place, most, repeat=True), length)

    def guess(self) -> tuple[int, int] | None:
        if self._noted:
            return None
        length, place = self._seen.own_match()
        return None if length < self._least else (self._seen.text[place], length)

    def cursor(self) -> tuple[int, int] | None:
        return None if self._noted else self._seen.own_state

    def followers(self, cursor: object, most: int) -> list[tuple[int, int]]:
        state, length = _as_state(cursor)
        return self._seen.followers(state, length, self._least, most)

    def follow(self, cursor: object, token: int) -> tuple[int, int]:
        return self._seen.step(*_as_state(cursor), token)


def _as_state(cursor: object) -> tuple[int, int]:
    assert isinstance(cursor, tuple)
    return cursor


class NgramSource(ProposerSource):
    def __init__(self, least_match: int) -> None:
        self._least = least_match

    def open(self, tokens: Sequence[int], num_prompt_tokens: int, domain: object) -> Proposer:
        proposer = NgramProposer(self._least)
        proposer.extend(tokens)
        return proposer
