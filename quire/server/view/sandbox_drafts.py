"""Guesses for a small engine to look at: its tokens are known beforehand, so a story can say how many are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

from quire.executor.dummy import dummy_token
from quire.speculation.proposer import Proposal, Proposer, ProposerSource


class ForeseenProposer(Proposer):
    """Proposes what will follow, each token wrong with some probability."""

    def __init__(self, seed: int, position: int, vocab_size: int, right: float) -> None:
        self._seed, self._position, self._vocab_size, self._right = seed, position, vocab_size, right
        self._random = random.Random(seed)

    def extend(self, tokens: Sequence[int]) -> None:
        self._position += len(tokens)

    def propose(self, most: int) -> Proposal:
        tokens = [dummy_token(self._seed, 0, self._position + i, self._vocab_size) for i in range(most)]
        return Proposal(tuple(token if self._random.random() < self._right else (token + 1) % self._vocab_size
                              for token in tokens), evidence=1)

    # ---- trees: a cursor is a place, and None one after a wrong guess

    def cursor(self) -> object:
        return self._position, True

    def followers(self, cursor: object, most: int) -> list[tuple[int, int]]:
        """The token to come is the first of them, the second, ... or, after a wrong one always, none."""
        place, true = cast(tuple[int, bool], cursor)
        token, chance = dummy_token(self._seed, 0, place, self._vocab_size), random.Random(f"{self._seed} {place}")
        rank = next((rank for rank in range(most) if chance.random() < self._right), most) if true else most
        return [((token + rank - each) % self._vocab_size, 1) for each in range(most)]

    def follow(self, cursor: object, token: int) -> object:
        place, true = cast(tuple[int, bool], cursor)
        return place + 1, true and token == dummy_token(self._seed, 0, place, self._vocab_size)


class ForeseenSource(ProposerSource):
    """`first_own`: prompts of visitor n end in tokens from first_own + 1000 n on, and n is the seed of what follows."""

    def __init__(self, first_own: int, vocab_size: int, right: float) -> None:
        self._first_own, self._vocab_size, self._right = first_own, vocab_size, right

    def open(self, tokens: Sequence[int], num_prompt_tokens: int, domain: object) -> Proposer:
        seed = (tokens[num_prompt_tokens - 1] - self._first_own) // 1000
        return ForeseenProposer(seed, len(tokens), self._vocab_size, self._right)
