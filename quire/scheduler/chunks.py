"""How many tokens of a sequence one step computes."""

from __future__ import annotations

from collections.abc import Iterable

from quire.scheduler.draft import Draft
from quire.scheduler.limits import Limits
from quire.scheduler.pacing import StepPacer
from quire.scheduler.request import Request, Sequence


class ChunkSizes:
    """From the step's budget, the limits, and the pacer where streams are to stay smooth."""

    def __init__(self, limits: Limits, pacer: StepPacer | None) -> None:
        self._limits = limits
        self._pacer = pacer

    def next(self, draft: Draft, seq: Sequence, start: int, todo: int) -> int:
        """How many of `todo` tokens from `start` on to compute now; 0: none."""
        threshold = self._limits.long_prefill_token_threshold
        tokens = min(todo, draft.budget, threshold) if threshold else min(todo, draft.budget)
        if self._pacer is None or draft.load is None:
            return tokens
        return self._pacer.room(draft.load, start, tokens, seq.request.params.prompt_logprobs is not None)

    def first(self, draft: Draft, seq: Sequence, start: int, todo: int, running: Iterable[Request]) -> int:
        """How many tokens of a waiting request to begin with; 0: not now."""
        # A preempted request may have outgrown the step that its prompt was admitted for.
        if not self._limits.chunked_prefill and not seq.request.num_preemptions:
            return todo if todo <= draft.budget else 0
        tokens = self.next(draft, seq, start, todo)
        if tokens < todo and draft.partial_prefills(running) >= self._limits.max_num_partial_prefills:
            return 0
        return tokens

    def takes_drafts(self, draft: Draft, start: int, tokens: int) -> bool:
        """May a decoding sequence compute so many at once?"""
        if tokens > draft.budget:
            return False
        return self._pacer is None or draft.load is None or self._pacer.allows(draft.load, start, tokens)
