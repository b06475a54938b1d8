"""Plans each step (which sequences compute how many tokens, which wait, which are preempted) and processes its result.

There is no prefill phase and no decode phase, only sequences that know more tokens than they have KV for. The work is
in the files beside this one: `admission`, `arriving`, `running`, `forks`, `giving_way`, `results`, `endings`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from quire.errors import InvalidRequestError, InvariantError
from quire.kvcache.examination import finish
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.reservations import Reservation
from quire.scheduler.admission import Admissions
from quire.scheduler.arriving import Arriving
from quire.scheduler.chunks import ChunkSizes
from quire.scheduler.diffs import Diff
from quire.scheduler.draft import Draft, Planned, table_diffs
from quire.scheduler.endings import Endings
from quire.scheduler.forks import Forks
from quire.scheduler.giving_way import GivingWay
from quire.scheduler.limits import Limits as Limits
from quire.scheduler.limits import longest_allowed
from quire.scheduler.pacing import StepPacer
from quire.scheduler.plan import BlockCopy, BlockMove, EntryResult, StepPlan, StepResult, TransferReport, TransferStart
from quire.scheduler.policy import BatchingPolicy, DecodeFirst, Phase
from quire.scheduler.preemption import Preemption, PreemptionReason
from quire.scheduler.queue import FCFSQueue, WaitingQueue
from quire.scheduler.remote import FirstToken
from quire.scheduler.request import FinishReason, Request, Sequence, Status
from quire.scheduler.results import Results
from quire.scheduler.roster import Roster
from quire.scheduler.running import RunningPlanner
from quire.scheduler.state import SchedulerState
from quire.scheduler.stats import SchedulerStats as SchedulerStats
from quire.scheduler.step_cost import StepLoad
from quire.scheduler.updates import SequenceUpdate as SequenceUpdate
from quire.speculation.speculator import Speculator
from quire.structured.gate import GRAMMAR_END, add_masks

_OUTSIDE_SECONDS = 1.0
"""Seconds between two looks at blocks that another engine still reads or may write."""


class Scheduler:
    """Continuous batching over a `KVCacheManager`. No tensors, and no clock but the one passed in."""

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
        self.arriving = self._roster.arriving
        """Requests whose KV is in transfer."""
        self.peer_metrics: Callable[[], dict[str, int | float]] | None = None
        """Metrics of the work exchanged with other engines, if there are any."""
        self._clock = clock
        self._pacer = pacer
        self._state = state = SchedulerState(
            limits, cache, self.waiting, self.policy, self.preemption, self.stats, self._roster, clock,
            ChunkSizes(limits, pacer), pacer, speculator)
        self._endings = Endings(state)
        self._forks = Forks(state, self._endings)
        self._giving_way = GivingWay(state, self._endings)
        self._planner = RunningPlanner(state, self._endings, self._forks, self._giving_way)
        self._arrivals = Arriving(state, self._endings)
        self._admissions = Admissions(state, self._endings, self._giving_way, self._planner, self._arrivals)
        self._results = Results(state, self._endings, self._forks)
        self._in_flight: deque[tuple[StepPlan, list[Planned]]] = deque()
        self._num_added = 0
        self._steps = 0

    @property
    def speculator(self) -> Speculator | None:
        return self._state.speculator

    @speculator.setter
    def speculator(self, speculator: Speculator | None) -> None:
        """Set between requests only; None turns speculation off."""
        self._state.speculator = speculator

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request, or refuse one that could never run."""
        if request.request_id in self._roster.requests:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", field="request_id")
        request.max_len = longest_allowed(request, self.limits, self.cache)
        request.arrival_index = self._num_added
        self._num_added += 1
        self.cache.name_prompt(request.sequences[0].kv, request.sequences[0].tokens)
        self._roster.add(request)

    def take_asking(self) -> list[tuple[Request, Reservation]]:
        """Requests since the last call whose prompt another engine is to compute."""
        asking, self._state.asking = self._state.asking, []
        return asking

    def take_first_token(self, request: Request, first: FirstToken) -> bool:
        """Append the first token, drawn by the engine that computes the request's prompt; false if none is due."""
        if request.status is not Status.ARRIVING or request.fetch is None or not request.fetch.token_due:
            return False
        request.fetch.token_due = False
        self._results.take_first_token(request.live[0], first)
        return True

    def go_without(self, request: Request, reason: str) -> None:
        """No other engine computes the prompt, or only a part: the request continues with the KV that has arrived."""
        if request.remote is not None:
            request.remote.given_up = True
        if request.reservation is not None:
            self.cache.reservations.cancel(request.reservation, reason)
        if request.status is Status.ARRIVING and request.fetch is not None:
            request.fetch.error = request.fetch.error or reason
            self._arrivals.look()

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is and free all it holds; false if there is no such request."""
        request = self._roster.requests.get(request_id)
        if request is None:
            return False
        for seq in request.live:
            self._endings.finish(seq, FinishReason.ABORT)
        return True

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence from outside, as a stop string does. Emits no update, because the caller knows."""
        if seq.finished:
            return
        request = seq.request
        inherited = self._forks.hand_over(seq)
        self._endings.finish(seq, reason, stop_reason, silent=True)
        if not inherited:
            self._giving_way.requeue(request, PreemptionReason.LOST, may_move=False)
        elif request.status is Status.ARRIVING and not any(other.kv.tables for other in request.live):
            # The KV in transfer was for the sequence that has ended.
            self._giving_way.requeue(request, PreemptionReason.LOST, may_move=False)

    @property
    def has_requests(self) -> bool:
        return bool(self._roster.requests) or bool(self._in_flight)

    @property
    def has_work(self) -> bool:
        return (bool(self._roster.requests) or bool(self._in_flight) or bool(self._endings.updates)
                or bool(self.cache.transfers.drafted))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def on_preempt(self) -> Callable[[Request, PreemptionReason], None] | None:
        """Called after every preemption."""
        return self._giving_way.on_preempt

    @on_preempt.setter
    def on_preempt(self, told: Callable[[Request, PreemptionReason], None] | None) -> None:
        self._giving_way.on_preempt = told

    def tell_of_starts(self, told: Callable[[Request], None]) -> None:
        """Call `told` with every request when it starts for the first time."""
        self._state.on_start = told

    def take_updates(self) -> list[SequenceUpdate]:
        """Updates since the last call, in order."""
        return self._endings.take_updates()

    # ---- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run before a result or KV arrives."""
        self.look()
        if self.cache.tiers:
            self.cache.begin_draft(self._roster.rows.num_taken)
        draft = Draft(self.limits.max_num_batched_tokens, None if self._pacer is None else StepLoad())
        for request, error in self._roster.queue_compiled():
            self._endings.finish(request.live[0], FinishReason.ABORT, error=error)
        for seq in self.compiling.ended(self.running.values()):
            self._endings.finish(seq, FinishReason.STOP, GRAMMAR_END)
        if self._roster.forking:
            self._forks.fork_resumed()
        self._planner.sort(draft)
        for phase in self.policy.phases():
            if phase is Phase.ADMIT:
                self._admissions.admit(draft)
            else:
                self._planner.go_on(draft, draft.decoding if phase is Phase.DECODE else draft.prefilling)
            if not self.policy.goes_on(phase, self.limits.max_num_batched_tokens - draft.budget):
                break
        self.compiling.ask_now()
        self._state.short = draft.short or draft.preempted
        self._state.gave_way = draft.preempted or bool(draft.made_way)
        moves = self.cache.copies or self.cache.transfers.drafted or self.cache.transfers.cancels
        return self._submit(draft) if draft.planned or moves else None

    def _submit(self, draft: Draft) -> StepPlan:
        """Turn the draft into a plan and advance the sequences' `num_computed` and `num_pending` past it."""
        self._steps += 1
        freed, starts = self._roster.rows.take_changes()
        plan = StepPlan(self._steps, freed_rows=freed, starts=starts)
        if self.cache.copies:
            plan.copies = [BlockCopy(*copy) for copy in self.cache.take_copies()]
        self._add_transfers(plan)
        planned = list(draft.planned.values())
        plan.entries = [entry for _, entry, _ in planned]
        masked = add_masks((seq, entry) for seq, entry, _ in planned)
        if draft.decodes_only and not masked:
            plan.decoding = list(draft.planned), [entry.start for entry in plan.entries]
        diffs: list[Diff] = []
        plan.diffs = diffs
        for seq, entry, _ in planned:
            for table in seq.kv.tables:
                if table.dirty_from < len(table.blocks):
                    diffs.extend(table_diffs(seq))
                    break
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
            plan.head_rests = self.speculator.submitted(planned, draft.decodes_only)
            plan.drafts_follow = not draft.decodes_only and self.speculator.drafts_follow
        return plan

    def _add_transfers(self, plan: StepPlan) -> None:
        transfers = self.cache.transfers
        if transfers.drafted:
            plan.transfers = [
                TransferStart(t.number, t.tier.name, t.out, [BlockMove(m.group, m.device, m.place) for m in t.moves])
                for t in transfers.take_drafted(self._clock(), self.limits.fetch_timeout, self.cache.block_bytes)]
        if transfers.cancels:
            plan.cancels = transfers.take_cancels()

    # ---- KV in transfer

    def arrived(self, reports: list[TransferReport]) -> None:
        """Process transfer reports, whether or not they came with a step's result."""
        for report in reports:
            try:
                self.cache.transfers.report(report.number, report.num_done, report.finished, report.error)
            except InvariantError as error:
                self._endings.note_broken(error)
        if reports:
            self._arrivals.look()

    def look(self) -> None:
        """Check which KV has arrived, what is late, and which lookups were answered."""
        if self.arriving or self.cache.transfers.under_way or len(self.cache.leases) or len(self.cache.reservations):
            self.cache.expire(self._clock())
        if self.arriving:
            self._arrivals.look()

    @property
    def awaits_until(self) -> float | None:
        """When it will stop waiting for something from outside, by its own clock; None if it waits for nothing."""
        ends = [lookup.deadline for request in self.arriving.values() for lookup in request.lookups or ()
                if not lookup.settled]
        if self.cache.held_outside:
            ends.append(self._clock() + _OUTSIDE_SECONDS)
        ends += [request.fetch.until for request in self.arriving.values()
                 if request.fetch is not None and request.fetch.token_due]
        return min((end for end in (*ends, self.cache.next_end) if end is not None), default=None)

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock

    # ---- results

    def update(self, result: StepResult) -> None:
        """Process the result of the oldest step in flight: confirm KV, append tokens, end finished sequences."""
        self.arrived(result.arrivals)
        plan, planned = self._in_flight[0]
        if plan.step != result.step or len(result.entries) != len(planned):
            error = InvariantError(f"result of step {result.step} came when step {plan.step} was due")
            self.fail_step(self._endings.note_broken(error))
            return
        self._retire_step(result.entries)
        for (seq, entry, epoch), entry_result in zip(planned, result.entries, strict=True):
            # A sequence that finished or was preempted after the plan was made has left this row.
            if seq.epoch == epoch:
                self._results.take_in(seq, entry, entry_result)
        self.compiling.ask_now()

    def fail_step(self, message: str) -> None:
        """The oldest step in flight was lost: its sequences end with an error, all others continue.

        The step's transfers still report by themselves.
        """
        plan = self._in_flight[0][0]
        for seq, _, epoch in self._retire_step():
            if seq.epoch == epoch:
                self._endings.finish(seq, FinishReason.ABORT, error=message)
        # Sequences that got a row in this plan without computing anything: the worker may not know of that row.
        started = {start.row for start in plan.starts}
        for request in list(self.running.values()):
            if any(seq.row in started for seq in request.live):
                self._giving_way.requeue(request, PreemptionReason.LOST, may_move=False)

    def never_started(self, plan: StepPlan) -> None:
        """The plan did not reach the worker: nothing will report its transfers."""
        self.arrived([TransferReport(start.number, 0, True, "the transfer was never started")
                      for start in plan.transfers])

    def _retire_step(self, results: list[EntryResult] | None = None) -> list[Planned]:
        """The oldest step is back with these results; None: it was lost."""
        plan, planned = self._in_flight.popleft()
        if self._pacer is not None:
            self._pacer.done()
        if self.speculator is not None:
            self._state.tells_speculator = self.speculator.done(results)
        try:
            self.cache.steps_done(plan.step)
        except InvariantError as error:
            self._endings.note_broken(error)
        return planned

    def fail_stuck(self) -> None:
        """Requests remain, nothing is in flight or in transfer, nothing could be planned: end the one that blocks."""
        if self._state.gave_way or self.examine():
            return
        # A request that holds memory and cannot continue blocks those that wait for memory.
        holding = self.running or any(request.fetch is not None for request in self.arriving.values())
        if not holding and not len(self.waiting):
            return
        request = self._roster.victim() if holding else self.waiting.peek()
        # A sequence that ends with an error ends its whole group.
        self._endings.finish(request.live[0], FinishReason.ABORT,
                             error="the KV pool has no room left for this request")

    # ---- self-examination

    @property
    def broken(self) -> bool:
        """Whether the bookkeeping contradicted itself and the cache was not reset since."""
        return self._endings.broken

    @property
    def at_rest(self) -> bool:
        """Nothing runs and no blocks are being moved, so the cache can be reset."""
        return not self.running and not self.arriving and not self._in_flight and self.cache.resettable

    def examine(self) -> bool:
        """For an engine at rest: check everything, and reset the cache if anything is or was wrong; true if it was.

        Does nothing while sequences run or blocks are being moved; an affected sequence raises its own error then.
        """
        if not self.at_rest:
            return False
        finish(self.examination())
        return self.mend()

    def examination(self) -> Iterator[None]:
        """The checks of `examine`, in parts; notes what is wrong. Valid only if nothing changes between the parts."""
        try:
            yield from self._checks()
        except InvariantError as error:
            self._endings.note_broken(error)

    def mend(self) -> bool:
        """Reset the cache of an engine at rest if something was found wrong; true if it was."""
        if not self._endings.broken or not self.at_rest:
            return False
        for request in self.waiting:
            self._roster.forget_swapped(request)
        self.cache.reset()
        self._endings.quarantined.clear()
        self._endings.broken = False
        return True

    def check(self) -> None:
        """Check every cache invariant against the sequences that hold blocks; raises. For idle moments and tests."""
        finish(self._checks())

    def _checks(self) -> Iterator[None]:
        yield from self._roster.examination()
        yield from self.cache.examination([seq.kv for seq in self._roster.live] + self._endings.quarantined)
