"""What the scheduler tells about a sequence after a step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.plan import EntryResult
from quire.scheduler.request import Request, Sequence


@dataclass(slots=True)
class SequenceUpdate:
    """New tokens and state of one sequence, for the output processor."""

    request: Request
    sequence: Sequence
    new_tokens: list[int]
    logprobs: list[LogprobRecord] | None = None
    prompt_logprobs: list[LogprobRecord] | None = None


def cut_at_stop(result: EntryResult, stop_ids: Collection[int]) -> None:
    """Of several tokens, those after one that ends the sequence were never drawn."""
    for count, token in enumerate(result.tokens, start=1):
        if token in stop_ids:
            del result.tokens[count:]
            if result.logprobs is not None:
                del result.logprobs[count:]
            return
