"""Requests whose KV is on its way: neither waiting nor running, so they block no other request.

Progress is by token range: what has arrived without a gap counts as confirmed and can be found by others. When all has
come that will come, the request runs; what is missing it computes.
"""

from __future__ import annotations

from quire.errors import InvariantError
from quire.kvcache.transfers import Fetch
from quire.scheduler.endings import Endings
from quire.scheduler.request import FinishReason, Request, Sequence
from quire.scheduler.state import SchedulerState


class Arriving:
    def __init__(self, state: SchedulerState, endings: Endings) -> None:
        self._state = state
        self._endings = endings

    def begin(self, request: Request, fetch: Fetch) -> None:
        """The request at the head of the queue holds the blocks that `fetch` fills."""
        self._state.roster.arrive(request)
        self.wait_for(request, fetch)

    def wait_for(self, request: Request, fetch: Fetch) -> None:
        request.fetch = fetch
        if not fetch.over:
            self._state.stats.fetches += 1
        for seq in request.live:
            seq.num_confirmed = min(seq.num_computed, self._arrived_tokens(seq, fetch)) if seq.kv.tables else 0

    def arrived(self) -> list[Request]:
        """Those who wait for nothing any more, first come first."""
        return [request for request in self._state.roster.arriving.values()
                if request.fetch is not None and request.fetch.over]

    def look(self) -> None:
        """Take in what has arrived since the last look, and what will not."""
        now = self._state.clock()
        for request in list(self._state.roster.arriving.values()):
            if request.fetch is not None:
                self._advance(request, request.fetch)
            elif all(lookup.settled or (lookup.deadline is not None and now >= lookup.deadline)
                     for lookup in request.lookups or ()):
                self._state.roster.put_back(request)

    def _advance(self, request: Request, fetch: Fetch) -> None:
        try:
            for seq in request.live:
                if seq.kv.tables:
                    self._confirm(seq, fetch)
            if fetch.error is not None and (fetch.pending or fetch.token_due):
                self._go_without(request, fetch)
        except InvariantError as error:
            self._endings.quarantine(request.live[0], error)

    def _confirm(self, seq: Sequence, fetch: Fetch) -> None:
        """What has arrived from the front, without a gap, is there for everybody."""
        arrived = min(seq.num_computed, self._arrived_tokens(seq, fetch))
        if arrived > seq.num_confirmed:
            seq.num_confirmed = arrived
        awaited = self._state.cache.reservations.get(seq.request.reservation or -1) is not None
        self._state.cache.publish(seq.kv, seq.tokens, seq.num_confirmed, awaited)

    def _arrived_tokens(self, seq: Sequence, fetch: Fetch) -> int:
        return fetch.missing_from(seq.kv) * self._state.cache.block_size

    def _go_without(self, request: Request, fetch: Fetch) -> None:
        """Part of the KV will not arrive: keep what did and compute the rest. Other requests are not affected."""
        cache, roster = self._state.cache, self._state.roster
        self._state.stats.fetches_failed += 1
        cache.transfers.cancel(fetch)
        leader, *others = [seq for seq in request.live if seq.kv.tables]
        # Log-probabilities of the prompt need the logits of every token of it, so nothing of it can be kept.
        most = 0 if leader.lacks_prompt_logprobs else fetch.missing_from(leader.kv)
        if others:
            # The leader goes on from what it has of the prompt, and the others fork from it where that ends.
            most = min(most, leader.num_prompt_tokens // cache.block_size)
            for seq in others:
                broken = roster.leave_row(seq)
                if broken is not None:
                    raise broken
        kept = min(leader.num_computed, cache.cut(leader.kv, most))
        if kept == 0:
            request.computes = True
            if request.num_cached_tokens is not None and not request.num_preemptions:
                request.num_cached_tokens = 0
            error = roster.recall(request, None)
            if error is not None:
                self._endings.finish(leader, FinishReason.ABORT, error=self._endings.note_broken(error))
            return
        lost = leader.num_computed - kept + sum(seq.num_output_tokens for seq in others)
        if request.num_cached_tokens is not None and not request.num_preemptions:
            request.num_cached_tokens = min(request.num_cached_tokens, kept)
        else:
            self._state.stats.recomputed_tokens += lost
            request.counts.recomputed_tokens += lost
        leader.num_computed = leader.num_confirmed = kept
        if len(request.live) > 1 and leader.num_output_tokens:
            leader.held_at = leader.num_prompt_tokens
        fetch.pending.clear()
        fetch.token_due = False
