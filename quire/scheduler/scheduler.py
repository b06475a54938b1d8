"""Plans each step: who computes how many tokens, who waits, who is preempted; and takes in what came of it.

It knows no prefill phase and no decode phase, only sequences that know more tokens than they have KV for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from quire.errors import InvalidRequestError, InvariantError
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.table import PrefixMatch, SequenceKV
from quire.scheduler.chunks import ChunkSizes
from quire.scheduler.draft import Admission, Draft, Planned, table_diffs
from quire.scheduler.groups import (
    blocks_to_go_on,
    extra_blocks,
    fork_from,
    heir_of,
    inherit,
    reseat_beams,
    seat_hypotheses,
    unforked,
)
from quire.scheduler.leaders import PrefixLeaders
from quire.scheduler.limits import Limits as Limits
from quire.scheduler.limits import longest_allowed
from quire.scheduler.pacing import StepPacer
from quire.scheduler.plan import BlockCopy, EntryResult, PlanEntry, StepPlan, StepResult
from quire.scheduler.policy import BatchingPolicy, DecodeFirst, Phase
from quire.scheduler.preemption import Preemption, PreemptionReason
from quire.scheduler.queue import FCFSQueue, WaitingQueue
from quire.scheduler.request import FinishReason, Request, Sequence
from quire.scheduler.roster import Roster
from quire.scheduler.stats import SchedulerStats as SchedulerStats
from quire.scheduler.step_cost import StepLoad
from quire.scheduler.updates import SequenceUpdate as SequenceUpdate
from quire.scheduler.updates import cut_at_stop
from quire.speculation.speculator import Drafts, Speculator
from quire.structured.gate import GRAMMAR_END, add_masks, grammar_over

_EXAMINE_EVERY = 10.0  # seconds: a full check takes milliseconds for ten thousand blocks, too long for every pause


class Scheduler:
    """Continuous batching over a `KVCacheManager`: no tensors, and no clock but the one it is given."""

    def __init__(
        self,
        limits: Limits,
        cache: KVCacheManager,
        queue: WaitingQueue | None = None,
        policy: BatchingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        pacer: StepPacer | None = None,
        preemption: Preemption | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.policy = DecodeFirst() if policy is None else policy
        self.preemption = Preemption(cache) if preemption is None else preemption
        self.stats = SchedulerStats()
        self.waiting = FCFSQueue() if queue is None else queue
        self._roster = Roster(cache, self.waiting, self.preemption, self.stats, limits.max_num_seqs)
        self.running, self.compiling = self._roster.running, self._roster.compiling
        self.on_preempt: Callable[[Request, PreemptionReason], None] | None = None
        """Told of every preemption, once it is done."""
        self._clock = clock
        self._pacer = pacer
        self._chunks = ChunkSizes(limits, pacer)
        self.speculator = speculator
        self._in_flight: deque[tuple[StepPlan, list[Planned]]] = deque()
        self._updates: list[SequenceUpdate] = []
        self._quarantined: list[SequenceKV] = []
        self._broken = False
        self._examined_at = float("-inf")
        self._arrivals = 0
        self._steps = 0
        self._short = False

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request, or refuse one that could never run."""
        if request.request_id in self._roster.requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", field="request_id")
        request.max_len = longest_allowed(request, self.limits, self.cache)
        request.arrival_index = self._arrivals
        self._arrivals += 1
        self._roster.add(request)

    def abort(self, request_id: str) -> bool:
        """Stop a request wherever it is and free all it holds; false if there is no such request."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return False
        for seq in request.live:
            self._finish(seq, FinishReason.ABORT)
        return True

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence from outside, as a stop string does. No update is emitted: the caller knows."""
        if seq.finished:
            return
        heir = heir_of(seq)
        inherited = heir is None or inherit(seq, heir, self.cache, self._roster.rows)
        self._finish(seq, reason, stop_reason, silent=True)
        if not inherited:
            self._requeue(seq.request, PreemptionReason.LOST, may_move=False)

    @property
    def has_work(self) -> bool:
        return bool(self._roster.requests) or bool(self._in_flight) or bool(self._updates)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def take_updates(self) -> list[SequenceUpdate]:
        """News since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    # ---- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result comes in."""
        draft = Draft(self.limits.max_num_batched_tokens, None if self._pacer is None else StepLoad())
        for request, error in self._roster.queue_compiled():
            self._finish(request.live[0], FinishReason.ABORT, error=error)
        if self._roster.forking:
            self._fork_resumed()
        self._sort_running(draft)
        for phase in self.policy.phases():
            if phase is Phase.ADMIT:
                self._admit(draft)
            else:
                self._continue_running(draft, draft.decoding if phase is Phase.DECODE else draft.prefilling)
            if not self.policy.goes_on(phase, self.limits.max_num_batched_tokens - draft.budget):
                break
        self._short = draft.short or draft.preempted
        return self._submit(draft) if draft.planned or self.cache.copies else None

    def _sort_running(self, draft: Draft) -> None:
        for request in self.running.values():
            for seq in request.sequences:
                known = seq.held_at or len(seq.tokens) + seq.num_pending
                todo = known - seq.num_computed
                # Without a row it is finished; it may have to wait for its tokens in flight.
                if seq.row < 0 or todo < 1 or (seq.num_pending and request.needs_values(known)):
                    continue
                (draft.decoding if todo == 1 else draft.prefilling).append(seq)
        if self.speculator is not None and draft.decoding:
            draft.take_choice(self.speculator.choose(draft.decoding, draft.budget - len(draft.decoding)))

    def _continue_running(self, draft: Draft, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if draft.budget <= 0:
                return
            if seq.row >= 0:
                self._continue(draft, seq)

    def _continue(self, draft: Draft, seq: Sequence) -> None:
        start = seq.num_computed
        todo = (seq.held_at or len(seq.tokens) + seq.num_pending) - start
        tokens = 1 if todo == 1 else self._chunks.next(draft, seq, start, todo)
        if tokens == 0:
            return
        drafts = draft.drafts.get(seq.row) if todo == 1 else None
        if drafts is not None and self._plan_drafts(draft, seq, drafts):
            return
        while True:
            try:
                fits = self.cache.extend(seq.kv, start + tokens, start)
            except InvariantError as error:
                self._quarantine(seq, error)
                return
            if fits:
                self._plan(draft, seq, tokens)
                return
            if self.cache.waits_for_limbo:
                draft.short = True
                return
            victim = self._roster.victim()
            self._preempt(draft, victim, PreemptionReason.MEMORY)
            if victim is seq.request:
                return

    def _plan_drafts(self, draft: Draft, seq: Sequence, drafts: Drafts) -> bool:
        """One token and its drafts, where that takes nothing from anybody; else they are not worth it."""
        start, tokens = seq.num_computed, 1 + drafts.count
        if not self._chunks.takes_drafts(draft, start, tokens):
            return False
        try:
            if not self.cache.extend(seq.kv, start + tokens, start):
                return False
        except InvariantError as error:
            self._quarantine(seq, error)
            return True
        in_worker = 0 if drafts.tokens else drafts.count
        draft.add(seq, PlanEntry(seq.row, start, tokens, True, drafts.tokens, device_drafts=in_worker))
        return True

    def _plan(self, draft: Draft, seq: Sequence, tokens: int) -> None:
        request = seq.request
        start = seq.num_computed
        end = start + tokens
        entry = PlanEntry(seq.row, start, tokens, end == len(seq.tokens) + seq.num_pending)
        if start < seq.num_prompt_tokens - 1 and request.params.prompt_logprobs is not None:
            first = max(start, request.prompt_logprobs_done)
            entry.prompt_logprobs_from = first if first < min(end, seq.num_prompt_tokens - 1) else None
        if request.grouped:
            self._plan_grouped(draft, seq, entry)
        else:
            draft.add(seq, entry)

    # ---- groups

    def _plan_grouped(self, draft: Draft, seq: Sequence, entry: PlanEntry) -> None:
        request, end = seq.request, entry.start + entry.num_tokens
        if request.beams is not None:
            # The worker has not drawn these tokens: the search chose them.
            entry.given = tuple(seq.tokens[max(entry.start, seq.num_prompt_tokens) : end])
            entry.candidates = request.beams.num_candidates if entry.sample else 0
            entry.sample = False
        draft.add(seq, entry)
        if entry.sample and end == seq.num_prompt_tokens:
            self._fork_at_prompt(draft, seq, end)

    def _fork_at_prompt(self, draft: Draft, leader: Sequence, end: int) -> None:
        """The leader's logits at the end of the prompt are everyone's: each sibling draws from them."""
        siblings = unforked(leader.request)
        if self._fork(leader, siblings, end):
            for seq in siblings:
                draft.add(seq, PlanEntry(seq.row, end, 0, True, shares=leader.row))

    def _fork_resumed(self) -> None:
        """Siblings that had drawn tokens before a preemption begin again where the prompt ends."""
        for request in list(self._roster.forking.values()):
            leader = request.live[0]
            # Not before that is confirmed: the leader may end, and siblings would trust a step that is lost later.
            if leader.num_confirmed >= leader.num_prompt_tokens:
                del self._roster.forking[request.request_id]
                self._fork(leader, unforked(request), leader.num_prompt_tokens)

    def _fork(self, leader: Sequence, siblings: list[Sequence], at: int) -> bool:
        try:
            fork_from(leader, siblings, at, self.cache, self._roster.rows)
        except InvariantError as error:
            self._quarantine(leader, error)
            return False
        self.stats.forks += len(siblings)
        return True

    def _advance_beams(self, request: Request) -> None:
        """All beams have reported what may follow them: choose, fork, free; or end the request."""
        beams = request.beams
        if beams is None:
            return
        choices = beams.advance(request.max_len - request.num_prompt_tokens)
        if beams.done:
            self._finish_beams(request)
            return
        roster = self._roster
        try:
            self.stats.forks += reseat_beams(request, choices, self.cache, roster.rows, roster.leave_row)
        except InvariantError as error:
            self._quarantine(request.live[0], error)

    def _finish_beams(self, request: Request) -> None:
        """The sequences become the complete beams, best first."""
        for seq, hypothesis in seat_hypotheses(request):
            self.stats.output_tokens += len(hypothesis.tokens)
            self._updates.append(SequenceUpdate(request, seq, hypothesis.tokens))
            self._finish(seq, FinishReason.STOP if hypothesis.ended else FinishReason.LENGTH, silent=True)

    # ---- admission

    def _admit(self, draft: Draft) -> None:
        # Memory taken back for running sequences is theirs first: else a newcomer takes it again, for ever.
        if (self._short and self.running) or not self.policy.admits(len(self.running)):
            return
        while draft.budget > 0 and len(self.waiting) and not draft.preempted:
            request = self.waiting.peek()
            if request in draft.made_way:
                return
            if not self._roster.has_rows_for(request):
                came = Admission.NO_ROOM
            elif request.swapped is not None:
                came = self._swap_in(draft, request)
            else:
                came = self._begin(draft, request)
            if came is Admission.DONE or (came is Admission.NO_ROOM and self._make_way(draft, request)):
                continue
            return

    def _begin(self, draft: Draft, request: Request) -> Admission:
        """Start a request from its prompt, or from all the tokens it knows after a preemption."""
        seq = request.live[0]
        # Siblings that have tokens of their own fork from the leader at the end of the prompt.
        held_at = seq.num_prompt_tokens if seq.num_output_tokens and len(request.live) > 1 else None
        known = held_at or len(seq.tokens)
        match = self._match(seq, known)
        tokens = self._chunks.first(draft, seq, match.num_tokens, known - match.num_tokens, self.running.values())
        if tokens == 0 or (self.cache.prefix_caching and self._follows(draft, seq, match, known)):
            return Admission.LATER
        # One slot more than is known: who cannot even hold the next token would be preempted at once.
        length = min(len(seq.tokens) + 1, request.max_len)
        if not self.cache.fits(length, match, tokens, extra_blocks(request, self.cache)):
            return Admission.NO_ROOM
        seq.held_at = held_at
        self._start(draft, request, seq, match, tokens)
        return Admission.DONE

    def _match(self, seq: Sequence, num_tokens: int) -> PrefixMatch:
        # Log-probabilities of the prompt need the logits of every token of it, cached or not.
        return self.cache.no_match() if seq.lacks_prompt_logprobs else self.cache.match(seq.kv, seq.tokens[:num_tokens])

    def _follows(self, draft: Draft, seq: Sequence, match: PrefixMatch, known: int) -> bool:
        """Is the rest of its prefix being computed for somebody else, so that it is cached soon?"""
        if not self.running or seq.lacks_prompt_logprobs:
            return False
        if draft.leaders is None:
            draft.leaders = PrefixLeaders(self.running.values(), self.cache.block_size)
        return draft.leaders.has_one_for(seq, match.num_tokens, known)

    def _start(self, draft: Draft, request: Request, seq: Sequence, match: PrefixMatch, tokens: int) -> None:
        try:
            self.cache.open(seq.kv, match)
            if not self.cache.extend(seq.kv, match.num_tokens + tokens, match.num_tokens):
                raise InvariantError("the cache promised room for a sequence and then had none")
        except InvariantError as error:
            self._quarantine(seq, error)
            return
        request.counts.tier_hits += match.num_outside
        request.counts.tier_hit_tokens += match.outside_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            request.first_scheduled_time = self._clock()
            self.cache.count_query(len(seq.tokens), match)
        else:
            again = len(seq.tokens) - match.num_tokens
            again += sum(other.num_output_tokens for other in request.live[1:])
            self.stats.recomputed_tokens += again
            request.counts.recomputed_tokens += again
        seq.num_computed = seq.num_confirmed = match.num_tokens
        self._roster.seat(request, [seq])
        if draft.leaders is not None:
            draft.leaders.add(seq)
        self._plan(draft, seq, tokens)

    def _swap_in(self, draft: Draft, request: Request) -> Admission:
        """Bring a request's KV back from the host; it goes on where it was."""
        swapped, swapper = request.swapped, self.preemption.swapper
        if swapped is None or swapper is None:
            return Admission.LATER
        if self._in_flight and swapped.step >= self._in_flight[0][0].step:
            return Admission.LATER
        seats = [seq for seq in request.live if any(seq.kv is kv for kv, _ in swapped.tables)]
        if not seats:
            self._roster.forget_swapped(request)
            return self._begin(draft, request)
        if any(len(seq.tokens) - seq.num_computed > 1 for seq in seats) and \
                draft.partial_prefills(self.running.values()) >= self.limits.max_num_partial_prefills:
            return Admission.LATER
        # With nobody else running what it had must do: the pool held it before.
        if not swapper.fits(swapped, blocks_to_go_on(request, seats, self.cache) if self.running else 0):
            return Admission.NO_ROOM
        moved = swapper.back(swapped, [seq.kv for seq in seats])
        request.swapped = None
        request.counts.swaps_in += 1
        request.counts.swap_bytes += moved
        if len(seats) < len(request.live) and seats[0].num_output_tokens:
            seats[0].held_at = seats[0].num_prompt_tokens
        self._roster.seat(request, seats)
        self._continue_running(draft, seats)
        return Admission.DONE

    def _submit(self, draft: Draft) -> StepPlan:
        """Turn the draft into a plan and move the sequences' progress to its end."""
        self._steps += 1
        freed, starts = self._roster.rows.take_changes()
        plan = StepPlan(self._steps, freed_rows=freed, starts=starts)
        if self.cache.copies:
            plan.copies = [BlockCopy(*copy) for copy in self.cache.take_copies()]
        planned = list(draft.planned.values())
        plan.entries = [entry for _, entry, _ in planned]
        for seq, entry, _ in planned:
            for table in seq.kv.tables:
                if table.dirty_from < len(table.blocks):
                    plan.diffs.extend(table_diffs(seq))
                    break
            add_masks(seq, entry)
            start = entry.start
            seq.num_computed = end = start + entry.num_tokens
            if start < seq.num_prompt_tokens:
                self.stats.prompt_tokens += min(end, seq.num_prompt_tokens) - start
            if entry.sample:
                seq.num_pending += 1
        self._in_flight.append((plan, planned))
        self.waiting.charge(planned)
        self.cache.steps_submitted(plan.step)
        self.stats.steps += 1
        if self._pacer is not None and draft.load is not None:
            self._pacer.submitted(draft.load)
        if self.speculator is not None:
            self.speculator.submitted(planned)
        return plan

    # ---- preemption

    def _make_way(self, draft: Draft, request: Request) -> bool:
        """Preempt for a waiting request that goes before a running one; false if there is none to preempt."""
        victim = None if self.cache.waits_for_limbo else self._roster.gives_way(request)
        if victim is None:
            return False
        draft.made_way.append(victim)
        self._preempt(draft, victim, PreemptionReason.PRIORITY)
        return True

    def _preempt(self, draft: Draft, request: Request, reason: PreemptionReason) -> None:
        """Take a request's memory away; it goes back to the head of the queue with the tokens it has."""
        draft.preempted |= reason is PreemptionReason.MEMORY
        draft.drop(request)
        # Alone and still short: its KV would come back to the same pool and be short again.
        self._requeue(request, reason, may_move=len(self.running) > 1 or reason is PreemptionReason.PRIORITY)

    def _requeue(self, request: Request, reason: PreemptionReason, may_move: bool) -> None:
        error = self._roster.requeue(request, reason, may_move)
        if request.swapped is not None:
            request.swapped.step = self._steps + 1
        if self.on_preempt is not None:
            self.on_preempt(request, reason)
        if error is not None:
            self._finish(request.live[0], FinishReason.ABORT, error=self._note_broken(error))

    # ---- when the bookkeeping contradicts itself

    def _note_broken(self, error: InvariantError) -> str:
        self._broken = True
        self.stats.invariant_errors += 1
        return f"internal error, the request was stopped: {error}"

    def _quarantine(self, seq: Sequence, error: InvariantError) -> None:
        """End the sequence around which it broke, keep its blocks out of circulation, go on serving."""
        self._quarantined.append(seq.kv)
        seq.kv = SequenceKV(seq.kv.key)
        self._finish(seq, FinishReason.ABORT, error=self._note_broken(error))

    def rest(self) -> None:
        """There is nothing to do: a moment to examine everything, if that was not done lately."""
        now = self._clock()
        if self._broken or now - self._examined_at >= _EXAMINE_EVERY:
            self._examined_at = now
            self.examine()

    def examine(self) -> bool:
        """For an engine at rest: check everything, and start the cache afresh if anything is or was wrong.

        True if it had to. While sequences run nothing is mended: those concerned find out themselves.
        """
        if self.running or self._in_flight:
            return False
        try:
            self.check()
        except InvariantError as error:
            self._note_broken(error)
        if not self._broken:
            return False
        for request in self.waiting:
            self._roster.forget_swapped(request)
        self.cache.reset()
        self._quarantined.clear()
        self._broken = False
        return True

    # ---- results

    def update(self, result: StepResult) -> None:
        """Take in the oldest step in flight: confirm KV, append tokens, stop what is done."""
        plan, planned = self._in_flight[0]
        if plan.step != result.step or len(result.entries) != len(planned):
            error = InvariantError(f"result of step {result.step} came when step {plan.step} was due")
            self.fail_step(self._note_broken(error))
            return
        self._retire_step()
        for (seq, entry, epoch), entry_result in zip(planned, result.entries, strict=True):
            # Who finished, or was preempted, after the plan was made has left this row.
            if seq.epoch == epoch:
                if entry_result.error is not None:
                    self._finish(seq, FinishReason.ABORT, error=entry_result.error)
                else:
                    self._take_in(seq, entry, entry_result)

    def fail_step(self, message: str) -> None:
        """The oldest step in flight was lost: its sequences end with an error, everyone else goes on."""
        plan = self._in_flight[0][0]
        for seq, _, epoch in self._retire_step(lost=True):
            if seq.epoch == epoch:
                self._finish(seq, FinishReason.ABORT, error=message)
        for request in self.waiting:
            if request.swapped is not None and request.swapped.step == plan.step:
                self._roster.forget_swapped(request)
        # Who got a row in it, or its KV back, without computing anything: the worker may not know of that.
        started = {start.row for start in plan.starts}
        for request in list(self.running.values()):
            if any(seq.row in started for seq in request.live):
                self._requeue(request, PreemptionReason.LOST, may_move=False)

    def _retire_step(self, lost: bool = False) -> list[Planned]:
        plan, planned = self._in_flight.popleft()
        if self._pacer is not None:
            self._pacer.done()
        if self.speculator is not None:
            self.speculator.done(lost)
        try:
            self.cache.steps_done(plan.step, lost)
        except InvariantError as error:
            self._note_broken(error)
        return planned

    def fail_stuck(self) -> None:
        """Requests are left, nothing is in flight, nothing could be planned: end the one in the way."""
        if self.examine():
            return
        # Who runs and cannot go on holds the memory that the others wait for.
        request = self._roster.victim() if self.running else self.waiting.peek()
        # With an error one sequence ends its whole group.
        self._finish(request.live[0], FinishReason.ABORT, error="the KV pool has no room left for this request")

    def _take_in(self, seq: Sequence, entry: PlanEntry, result: EntryResult) -> None:
        end, tokens = entry.start + entry.num_tokens, result.tokens
        if self.speculator is not None and entry.sample and tokens:
            accepted = len(tokens) - 1
            cut_at_stop(result, seq.request.stop_ids)
            self.speculator.took(seq, entry, result, accepted)
            if entry.num_drafts:  # What was refused, or follows the end, has neither tokens nor KV.
                end = seq.num_computed = entry.start + len(tokens)
        seq.num_confirmed = end
        if entry.prompt_logprobs_from is not None:
            seq.request.prompt_logprobs_done = min(end, seq.num_prompt_tokens - 1)
        if entry.sample:
            if not tokens:
                self._finish(seq, FinishReason.ABORT, error="the step of this request drew no token for it")
                return
            seq.num_pending -= 1
            seq.tokens.extend(tokens)
            self.stats.output_tokens += len(tokens)
        if tokens or result.prompt_logprobs:
            self._updates.append(
                SequenceUpdate(seq.request, seq, tokens, result.logprobs, result.prompt_logprobs))
        try:
            if end // self.cache.block_size > seq.kv.num_registered:
                self.cache.publish(seq.kv, seq.tokens, end)
            if self.cache.has_windows:
                self.cache.leave_window(seq.kv, seq.num_computed)
        except InvariantError as error:
            self._quarantine(seq, error)
            return
        if tokens:
            self._stop_if_done(seq)
        elif entry.candidates and seq.request.beams is not None:
            self._report(seq, result)

    def _report(self, seq: Sequence, result: EntryResult) -> None:
        request = seq.request
        if request.beams is None or not result.candidates:
            self._finish(seq, FinishReason.ABORT, error="the step of this request found no next tokens")
        elif request.beams.report(request.places.index(seq), result.candidates):
            self._advance_beams(request)

    def _stop_if_done(self, seq: Sequence) -> None:
        request, last = seq.request, seq.tokens[-1]
        if last in request.stop_ids:
            self._finish(seq, FinishReason.STOP, request.named_stop(last), silent=True)
        elif grammar_over(seq):
            self._finish(seq, FinishReason.STOP, GRAMMAR_END, silent=True)
        elif len(seq.tokens) >= request.max_len:
            self._finish(seq, FinishReason.LENGTH, silent=True)

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None,
                error: str | None = None, silent: bool = False) -> None:
        """End one sequence, and its request with the last one. `silent`: news of it goes out already."""
        broken = self._roster.leave_row(seq)
        if broken is not None:
            said = self._note_broken(broken)
            reason, stop_reason, error = FinishReason.ABORT, None, error or said
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
        if self.speculator is not None:
            self.speculator.forget(seq)
        if not silent:
            self._updates.append(SequenceUpdate(seq.request, seq, []))
        if seq.request.finished:
            self._roster.part_with(seq.request)
        elif error is not None:
            # A group ends as one.
            for other in seq.request.live[:1]:
                self._finish(other, FinishReason.ABORT, error=error)

    # ---- self-examination

    def check(self) -> None:
        """Every invariant of the cache against the sequences that hold it; for idle moments and tests."""
        live = self._roster.check()
        self.cache.check([seq.kv for seq in live] + self._quarantined)
