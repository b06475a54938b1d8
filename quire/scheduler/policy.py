"""What fills a step first. A policy names the phases in order; the scheduler knows how to do each."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod


class Phase(enum.Enum):
    DECODE = "decode"
    """Running sequences that lack one token."""
    PREFILL = "prefill"
    """Running sequences in the middle of a prompt."""
    ADMIT = "admit"
    """Waiting requests."""


class BatchingPolicy(ABC):
    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Phases in the order in which they take tokens from the step's budget."""

    @abstractmethod
    def goes_on(self, done: Phase, num_tokens: int) -> bool:
        """After phase `done`, with `num_tokens` planned so far: look at the next phase?"""

    def admits(self, num_running: int) -> bool:
        """May waiting requests join a step that begins with `num_running` requests in it?"""
        return True


class DecodeFirst(BatchingPolicy):
    """Decode first: sequences that stream never wait for a prefill, which gets the rest of the token budget."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase.DECODE, Phase.PREFILL, Phase.ADMIT)

    def goes_on(self, done: Phase, num_tokens: int) -> bool:
        return True


class PrefillFirst(BatchingPolicy):
    """Prompts go first and are not mixed with decoding: best time to first token, worst stutter."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase.PREFILL, Phase.ADMIT, Phase.DECODE)

    def goes_on(self, done: Phase, num_tokens: int) -> bool:
        return done is not Phase.ADMIT or num_tokens == 0


class StaticBatch(DecodeFirst):
    """Static batches: requests that wait together run together, and no other joins before the last has finished.

    What engines did before continuous batching; here to be compared with.
    """

    def admits(self, num_running: int) -> bool:
        return num_running == 0


BATCHING_POLICIES: dict[str, type[BatchingPolicy]] = {
    "decode-first": DecodeFirst,
    "prefill-first": PrefillFirst,
    "static": StaticBatch,
}
