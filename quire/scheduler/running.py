"""Plans the running sequences: the next token, the next prompt chunk, and drafts if there is room for them."""

from __future__ import annotations

from quire.errors import InvariantError
from quire.scheduler.draft import Draft
from quire.scheduler.endings import Endings
from quire.scheduler.forks import Forks
from quire.scheduler.giving_way import GivingWay
from quire.scheduler.plan import PlanEntry
from quire.scheduler.preemption import PreemptionReason
from quire.scheduler.request import Request, Sequence
from quire.scheduler.state import SchedulerState
from quire.speculation.speculator import Drafts
from quire.structured.gate import mask_ready


class RunningPlanner:
    def __init__(self, state: SchedulerState, endings: Endings, forks: Forks, giving_way: GivingWay) -> None:
        self._state = state
        self._endings = endings
        self._forks = forks
        self._giving_way = giving_way

    def sort(self, draft: Draft) -> None:
        """Sort running sequences into those that need one token (decoding) and those that need more (prefilling)."""
        stages = self._state.limits.num_stages
        in_flight = 0
        for request in self._state.roster.running.values():
            for seq in request.sequences:
                known = seq.held_at or len(seq.tokens) + seq.num_pending
                todo = known - seq.num_computed
                # Skip sequences that are finished (no row), or wait for their tokens in flight or for their mask.
                if (seq.row < 0 or todo < 1 or (seq.num_pending and (stages > 1 or request.needs_values(known)))
                        or not mask_ready(seq)):
                    in_flight += seq.row >= 0
                    continue
                (draft.decoding if todo == 1 else draft.prefilling).append(seq)
        if stages > 1:
            # Pipeline stages share decoding sequences evenly: those in flight are the share of the other stages.
            del draft.decoding[-(-(len(draft.decoding) + in_flight) // stages) :]
        speculator = self._state.speculator
        if speculator is not None and draft.decoding:
            draft.take_choice(speculator.choose(draft.decoding, draft.budget - len(draft.decoding)))
            draft.proposals = self._state.roster.compiling.with_masks(draft.proposals, draft.decoding)

    def begin(self, draft: Draft, request: Request) -> None:
        """Plan a request that has just got rows and already has KV. If its whole prompt is computed, its siblings fork
        first: the leader has nothing to compute until they have."""
        if request.request_id in self._state.roster.forking:
            self._forks.fork_resumed()
        self.go_on(draft, [seq for seq in request.live if mask_ready(seq)])

    def go_on(self, draft: Draft, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if draft.budget <= 0:
                return
            if seq.row >= 0:
                self._go_on(draft, seq)

    def _go_on(self, draft: Draft, seq: Sequence) -> None:
        state = self._state
        start = seq.num_computed
        todo = (seq.held_at or len(seq.tokens) + seq.num_pending) - start
        tokens = 1 if todo == 1 else state.chunks.next(draft, seq, start, todo)
        if tokens <= 0:
            return
        drafts = draft.proposals.get(seq.row) if todo == 1 else None
        if drafts is not None and self._plan_drafts(draft, seq, drafts):
            return
        while True:
            try:
                fits = state.cache.extend(seq.kv, start + tokens, start)
            except InvariantError as error:
                self._endings.quarantine(seq, error)
                return
            if fits:
                self.plan(draft, seq, tokens)
                return
            if state.cache.room_is_coming:
                draft.short = True
                return
            victim = state.roster.victim()
            self._giving_way.preempt(draft, victim, PreemptionReason.MEMORY)
            if victim is seq.request:
                return

    def _plan_drafts(self, draft: Draft, seq: Sequence, drafts: Drafts) -> bool:
        """Plan one token and its drafts, if blocks for the drafts are free; drafts never preempt a sequence."""
        start, tokens = seq.num_computed, 1 + drafts.count
        if not self._state.chunks.takes_drafts(draft, start, tokens):
            return False
        try:
            state, most = self._state, min(start + tokens + drafts.ahead, self._state.limits.max_model_len)
            if not ((drafts.ahead and state.can_spare(most - start) and state.cache.extend(seq.kv, most, start))
                    or state.cache.extend(seq.kv, start + tokens, start)):
                return False
        except InvariantError as error:
            self._endings.quarantine(seq, error)
            return True
        in_worker = 0 if drafts.tokens else drafts.count
        draft.decodes_only = False
        draft.add(seq, PlanEntry(seq.row, start, tokens, True, drafts.tokens, device_drafts=in_worker,
                                 parents=drafts.parents, draft_depth=drafts.depth))
        return True

    def plan(self, draft: Draft, seq: Sequence, tokens: int) -> None:
        """Plan `tokens` more tokens of a sequence that has slots for them."""
        request = seq.request
        start = seq.num_computed
        end = start + tokens
        draws = end == len(seq.tokens) + seq.num_pending
        entry = PlanEntry(seq.row, start, tokens, draws)
        if tokens != 1 or not draws:
            draft.decodes_only = False
        if start < seq.num_prompt_tokens - 1 and request.params.prompt_logprobs is not None:
            first = max(start, request.prompt_logprobs_done)
            entry.prompt_logprobs_from = first if first < min(end, seq.num_prompt_tokens - 1) else None
        if request.grouped:
            self._forks.plan(draft, seq, entry)
        else:
            draft.add(seq, entry)
