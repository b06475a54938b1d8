"""News of one sequence, as outputs take it in: straight from the scheduler, or out of a message of the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.request import FinishReason, RequestCounts
from quire.scheduler.updates import SequenceUpdate


class News(Protocol):
    """`SequenceNews`, or the message of the same fields (`messages.SequenceNews`)."""

    @property
    def index(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def logprobs(self) -> Sequence[LogprobRecord] | None: ...
    @property
    def prompt_logprobs(self) -> Sequence[LogprobRecord] | None: ...
    @property
    def score(self) -> tuple[float, float] | None: ...
    @property
    def counts(self) -> RequestCounts | None: ...
    @property
    def num_sequences(self) -> int: ...


@dataclass(slots=True)
class SequenceNews:
    """As it comes from the scheduler of this process."""

    index: int
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[LogprobRecord] | None = None
    prompt_logprobs: list[LogprobRecord] | None = None
    score: tuple[float, float] | None = None
    """Of a complete beam: its cumulative log-probability, and that after the length penalty."""
    counts: RequestCounts | None = None
    num_sequences: int = 0
    """How many the request has come to, where that says which of its beams will never be."""

    @classmethod
    def of(cls, update: SequenceUpdate) -> SequenceNews:
        request, seq = update.request, update.sequence
        reason = seq.finish_reason
        scored = seq.score is not None and seq.cumulative_logprob is not None
        return cls(
            seq.index,
            update.new_tokens,
            finish_reason=None if reason is None else reason.value,
            stop_reason=seq.stop_reason,
            error=seq.error,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
            score=(seq.cumulative_logprob or 0.0, seq.score or 0.0) if scored else None,
            counts=request.counts,
            num_sequences=len(request.sequences) if request.beams is not None and reason is FinishReason.ABORT else 0,
        )
