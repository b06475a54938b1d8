"""What a proposer is: something that guesses how a sequence goes on. Its guesses may cost speed, never tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

NO_EVIDENCE = 0
SHORT = 64
"""Tokens that a proposer takes in at once, if it has none left over."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next, and how strong the evidence for them is.

    `evidence` is a proposer's own measure (here the length of the context that matched); acceptance is
    learned for each strength, and a token further on has the evidence of those before it on top.
    """

    tokens: tuple[int, ...]
    evidence: int = NO_EVIDENCE


class Proposer(ABC):
    """Proposes for one sequence, whose tokens it is shown in order. It sees no other sequence's unless `share`d.

    A proposer that needs a model runs in the worker instead: the plan asks for a number of drafts, and its
    tokens never leave the device. Trees grow from `cursor`, `followers` and `follow` (`quire.speculation.growing`).
    """

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens of the sequence are known. Many of them are only noted: `catch_up` works through them."""

    @abstractmethod
    def propose(self, most: int) -> Proposal:
        """Up to `most` tokens that may follow all that it was shown."""

    def cursor(self) -> object | None:
        """Where a tree begins: the end of all that it was shown. None: it offers no trees, or none now."""
        return None

    def followers(self, cursor: object, most: int) -> list[tuple[int, int]]:
        """Up to `most` different tokens that may come next, each with its evidence, best first."""
        return []

    def follow(self, cursor: object, token: int) -> object:
        """Where it is after one more token."""
        return cursor

    def catch_up(self, most: int) -> int:
        """Work through noted tokens until that has cost as much as `most` ordinary ones; what it cost."""
        return 0

    def finish(self) -> None:  # noqa: B027 (most have nothing to pass on)
        """The sequence has ended."""


class ProposerSource(ABC):
    """Makes the proposers of one engine, and keeps what they may have in common."""

    @abstractmethod
    def open(self, tokens: Sequence[int], num_prompt_tokens: int, domain: object) -> Proposer:
        """A proposer for a sequence; those of different domains (tenant, cache salt) share nothing."""

    def catch_up(self, most: int) -> int:
        """The same for tokens of sequences that have ended."""
        return 0
