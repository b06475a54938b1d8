"""The interface of proposers, which draft the next tokens of a sequence. Drafts affect speed, never tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

NO_EVIDENCE = 0
SHORT = 64
"""`extend` adds up to so many tokens at once; more are left to `catch_up`."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens and the evidence for them.

    `evidence` is the proposer's own measure, for lookups the length of the match. Acceptance is learned by evidence,
    and each further token counts one more, since its match is one token longer.
    """

    tokens: tuple[int, ...]
    evidence: int = NO_EVIDENCE


class Proposer(ABC):
    """Drafts for one sequence, whose tokens it is shown in order. What sequences share is kept by their
    `ProposerSource`.

    Proposers that need a model run in the worker instead: the plan asks for a number of drafts, and their tokens stay
    on the device. Trees are grown with `cursor`, `followers` and `follow` (`quire.speculation.growing`).
    """

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Show it more tokens of the sequence. Long runs are only queued, for `catch_up`."""

    @abstractmethod
    def propose(self, most: int) -> Proposal:
        """Up to `most` drafts after all tokens shown so far."""

    def guess(self) -> tuple[int, int] | None:
        """The first draft and its evidence."""
        found = self.propose(1)
        return (found.tokens[0], found.evidence) if found.tokens else None

    def cursor(self) -> object | None:
        """Where a tree begins: after all tokens shown so far. None: it offers no trees, or none now."""
        return None

    def followers(self, cursor: object, most: int) -> list[tuple[int, int]]:
        """Up to `most` alternatives for the next token, each with its evidence, best first."""
        return []

    def follow(self, cursor: object, token: int) -> object:
        """The cursor after one more token."""
        return cursor

    def catch_up(self, most: int) -> int:
        """Add queued tokens until the cost reaches `most` ordinary tokens; returns the cost."""
        return 0

    def finish(self, late: Sequence[int] = ()) -> None:  # noqa: B027 (most share nothing)
        """The sequence has ended, with `late` as its last tokens, which were never shown."""


class ProposerSource(ABC):
    """Makes the proposers of one engine, and keeps what they share."""

    @abstractmethod
    def open(self, tokens: Sequence[int], num_prompt_tokens: int, domain: object) -> Proposer:
        """A proposer for a sequence. Sequences of different domains (tenant, cache salt) share nothing."""

    def catch_up(self, most: int) -> int:
        """As `Proposer.catch_up`, for queued tokens of sequences that have ended."""
        return 0
