"""Plans each step: who computes how many tokens, who waits, who is preempted; and takes in what came of it.

There is no prefill phase and no decode phase here, only sequences that know more tokens than they have KV for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.errors import InvalidRequestError, InvariantError
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.table import PrefixMatch
from quire.scheduler.plan import BlockCopy, EntryResult, PlanEntry, RowStart, StepPlan, StepResult, TableDiff, TokenLogprobs
from quire.scheduler.policy import BatchingPolicy, DecodeFirst, Phase
from quire.scheduler.queue import FCFSQueue, WaitingQueue
from quire.scheduler.request import FinishReason, Request, Sequence, Status


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and one sequence may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    max_num_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """Running totals that the metrics report."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed (not found in the cache), recomputation included."""
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0


@dataclass(slots=True)
class SequenceUpdate:
    """News of one sequence, for whoever turns tokens into text."""

    request: Request
    sequence: Sequence
    new_tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class _Planned:
    """A plan entry with the sequence it speaks of and the copies that must come first."""

    sequence: Sequence
    entry: PlanEntry
    copies: list[BlockCopy]
    epoch: int


@dataclass(slots=True)
class _Draft:
    """The step under construction."""

    budget: int
    planned: dict[int, _Planned] = field(default_factory=dict)
    """By row, in the order of planning."""
    starts: list[RowStart] = field(default_factory=list)
    preempted: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(p.entry.num_tokens for p in self.planned.values())


class Scheduler:
    """Continuous batching over a `KVCacheManager`. Holds no tensors and reads no clock but the one it is given."""

    def __init__(
        self,
        limits: Limits,
        cache: KVCacheManager,
        queue: WaitingQueue | None = None,
        policy: BatchingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.waiting = FCFSQueue() if queue is None else queue
        self.policy = DecodeFirst() if policy is None else policy
        self.running: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed_rows: list[int] = []
        self._in_flight: deque[tuple[StepPlan, list[_Planned]]] = deque()
        self._updates: list[SequenceUpdate] = []
        self._quarantined: list[Sequence] = []
        self._arrivals = 0
        self._steps = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request, or refuse one that could never run."""
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use", field="request_id")
        self._refuse_oversized(len(request.prompt_token_ids))
        request.arrival_index = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def _refuse_oversized(self, num_prompt: int) -> None:
        limits = self.limits
        if num_prompt >= limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens; with at least one to generate, max_model_len "
                f"({limits.max_model_len}) allows {limits.max_model_len - 1}: shorten it or raise max_model_len",
                field="prompt")
        if not limits.chunked_prefill and num_prompt > limits.max_num_batched_tokens:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens and chunked prefill is off, so max_num_batched_tokens "
                f"({limits.max_num_batched_tokens}) is its limit: turn chunked prefill on or raise it", field="prompt")

    def abort(self, request_id: str) -> bool:
        """Stop a request wherever it is and free all it holds; false if there is no such request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for seq in request.live:
            self._finish(seq, FinishReason.ABORT)
        return True

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence from outside, as a stop string does. No update is emitted: the caller knows."""
        if not seq.finished:
            self._finish(seq, reason, stop_reason, silent=True)

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._in_flight) or bool(self._updates)

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
        draft = _Draft(self.limits.max_num_batched_tokens)
        for phase in self.policy.phases():
            if phase is Phase.ADMIT:
                self._admit(draft)
            else:
                self._continue_running(draft, phase)
            if not self.policy.goes_on(phase, len(draft.planned)):
                break
        if not draft.planned:
            return None
        return self._submit(draft)

    def _continue_running(self, draft: _Draft, phase: Phase) -> None:
        decode = phase is Phase.DECODE
        for request in list(self.running.values()):
            if draft.budget <= 0:
                return
            for seq in request.sequences:
                if seq.row < 0 or seq.finish_reason is not None:
                    continue
                todo = len(seq.tokens) + seq.num_pending - seq.num_computed
                if (todo == 1) is decode and todo > 0 and not self._drawn_out(seq):
                    self._continue(draft, seq, todo)

    def _drawn_out(self, seq: Sequence) -> bool:
        """Every token that the sequence may have is drawn or in flight."""
        return seq.num_pending > 0 and seq.num_tokens >= self._length_limit(seq)

    def _continue(self, draft: _Draft, seq: Sequence, todo: int) -> None:
        tokens = self._chunk(todo, draft.budget, whole=False)
        if tokens <= 0:
            return
        while True:
            try:
                copies = self.cache.extend(seq.kv, seq.num_computed + tokens, seq.num_computed)
            except InvariantError as error:
                self._quarantine(draft, seq, error)
                return
            if copies is not None:
                self._plan(draft, seq, tokens, copies)
                return
            if self.cache.waits_for_limbo:
                return
            victim = self._victim()
            self._preempt(draft, victim)
            if victim is seq.request:
                return

    def _admit(self, draft: _Draft) -> None:
        while draft.budget > 0 and self._rows and len(self.waiting) and not draft.preempted:
            request = self.waiting.peek()
            seq = request.live[0]
            match = self._match(seq)
            todo = len(seq.tokens) - match.num_tokens
            tokens = self._chunk(todo, draft.budget, whole=not self.limits.chunked_prefill and not request.num_preemptions)
            if tokens <= 0 or (tokens < todo and self._partial_prefills(draft) >= self.limits.max_num_partial_prefills):
                return
            # One slot more than is known: a sequence that cannot even hold its next token would be preempted at once.
            if not self.cache.fits(min(len(seq.tokens) + 1, self.limits.max_model_len), match):
                return
            self.waiting.pop()
            self._start(draft, request, seq, match, tokens)

    def _match(self, seq: Sequence) -> PrefixMatch:
        request = seq.request
        if request.params.prompt_logprobs is not None and request.prompt_logprobs_done < seq.num_prompt_tokens - 1:
            # Their log-probabilities need the logits of every prompt token, cached or not.
            return PrefixMatch(0, [[] for _ in self.cache.groups])
        return self.cache.match(seq.kv, seq.tokens)

    def _start(self, draft: _Draft, request: Request, seq: Sequence, match: PrefixMatch, tokens: int) -> None:
        self.cache.open(seq.kv, match)
        copies = self.cache.extend(seq.kv, match.num_tokens + tokens, match.num_tokens)
        if copies is None:
            raise InvariantError("the cache promised room for a sequence and then had none")
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens
            request.first_scheduled_time = self._clock()
            self.cache.count_query(len(seq.tokens), match.num_tokens)
        else:
            self.stats.recomputed_tokens += len(seq.tokens) - match.num_tokens
        seq.num_computed = seq.num_confirmed = match.num_tokens
        seq.row = self._rows.pop()
        request.status = Status.RUNNING
        self.running[request.request_id] = request
        draft.starts.append(RowStart(
            seq.row, list(seq.tokens), seq.num_prompt_tokens, request.params, request.seed, seq.index,
            sorted(request.stop_ids), request.bad_words))
        self._plan(draft, seq, tokens, copies)

    def _plan(self, draft: _Draft, seq: Sequence, tokens: int, copies: list[tuple[int, int, int]]) -> None:
        start = seq.num_computed
        end = start + tokens
        entry = PlanEntry(seq.row, start, tokens, sample=end == len(seq.tokens) + seq.num_pending)
        if seq.request.params.prompt_logprobs is not None and start < seq.num_prompt_tokens - 1:
            first = max(start, seq.request.prompt_logprobs_done)
            entry.prompt_logprobs_from = first if first < min(end, seq.num_prompt_tokens - 1) else None
        draft.planned[seq.row] = _Planned(seq, entry, [BlockCopy(*copy) for copy in copies], seq.epoch)
        draft.budget -= tokens

    def _submit(self, draft: _Draft) -> StepPlan:
        """Turn the draft into a plan and move the sequences' progress to its end."""
        self._steps += 1
        plan = StepPlan(self._steps, freed_rows=self._freed_rows, starts=draft.starts)
        self._freed_rows = []
        planned = list(draft.planned.values())
        for item in planned:
            seq, entry = item.sequence, item.entry
            plan.entries.append(entry)
            plan.copies.extend(item.copies)
            for group, table in enumerate(seq.kv.tables):
                if table.dirty_from < len(table.blocks):
                    start, blocks = table.take_dirty()
                    plan.diffs.append(TableDiff(seq.row, group, start, blocks))
            if entry.start < seq.num_prompt_tokens:
                self.stats.prompt_tokens += min(entry.start + entry.num_tokens, seq.num_prompt_tokens) - entry.start
            seq.num_computed = entry.start + entry.num_tokens
            if entry.sample:
                seq.num_pending += 1
        self._in_flight.append((plan, planned))
        self.cache.steps_submitted(plan.step)
        self.stats.steps += 1
        return plan

    def _chunk(self, todo: int, budget: int, whole: bool) -> int:
        """How many of `todo` tokens to compute now; `whole` asks for all or nothing."""
        if whole:
            return todo if todo <= budget else 0
        threshold = self.limits.long_prefill_token_threshold
        return min(todo, budget, threshold) if threshold else min(todo, budget)

    def _partial_prefills(self, draft: _Draft) -> int:
        """Running sequences that will still lack more than one token after what is planned for them."""
        count = 0
        for request in self.running.values():
            for seq in request.sequences:
                planned = draft.planned.get(seq.row)
                count += seq.num_to_compute - (planned.entry.num_tokens if planned else 0) > 1
        return count

    def _length_limit(self, seq: Sequence) -> int:
        limit = self.limits.max_model_len
        if seq.request.params.max_tokens is not None:
            limit = min(limit, seq.num_prompt_tokens + seq.request.params.max_tokens)
        return limit

    # ---- preemption

    def _victim(self) -> Request:
        """The lowest in priority; among equals, the last to come."""
        return max(self.running.values(), key=lambda r: (r.priority, r.arrival_index))

    def _preempt(self, draft: _Draft, request: Request) -> None:
        """Take a request's memory away; it goes back to the head of the queue with the tokens it has."""
        for seq in request.live:
            planned = draft.planned.pop(seq.row, None)
            if planned is not None:
                draft.budget += planned.entry.num_tokens
            draft.starts = [start for start in draft.starts if start.row != seq.row]
            self._leave_row(seq)
        del self.running[request.request_id]
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.put_back(request)
        draft.preempted = True

    def _leave_row(self, seq: Sequence) -> None:
        self.cache.free(seq.kv)
        if seq.row >= 0:
            self._freed_rows.append(seq.row)
            self._rows.append(seq.row)
        seq.rewind()

    def _quarantine(self, draft: _Draft, seq: Sequence, error: InvariantError) -> None:
        """Bookkeeping broke around this sequence: end it, leave its blocks out of circulation, go on serving."""
        draft.planned.pop(seq.row, None)
        self._quarantined.append(seq)
        kv, seq.kv = seq.kv, type(seq.kv)()
        self._finish(seq, FinishReason.ABORT, error=f"internal error, the request was stopped: {error}")
        seq.kv = kv

    # ---- results

    def update(self, result: StepResult) -> None:
        """Take in the oldest step in flight: confirm KV, append tokens, stop what is done, publish full blocks."""
        plan, planned = self._in_flight.popleft()
        if plan.step != result.step or len(result.entries) != len(planned):
            raise InvariantError(f"result of step {result.step} came when step {plan.step} was due")
        self.cache.steps_done(plan.step)
        for item, entry_result in zip(planned, result.entries, strict=True):
            seq = item.sequence
            if seq.epoch != item.epoch or seq.finish_reason is not None:
                continue
            if entry_result.error is not None:
                self._finish(seq, FinishReason.ABORT, error=entry_result.error)
            else:
                self._take_in(seq, item.entry, entry_result)

    def fail_step(self, message: str) -> None:
        """The oldest step in flight was lost: its sequences end with an error, everyone else goes on."""
        plan, planned = self._in_flight.popleft()
        self.cache.steps_done(plan.step)
        for item in planned:
            seq = item.sequence
            if seq.epoch == item.epoch and seq.finish_reason is None:
                self._finish(seq, FinishReason.ABORT, error=message)

    def fail_stuck(self) -> None:
        """Nothing runs, nothing is in flight and the head of the queue does not fit: end it rather than wait for ever."""
        request = self.waiting.peek()
        for seq in request.live:
            self._finish(seq, FinishReason.ABORT, error="the KV pool has no room left for this request")

    def _take_in(self, seq: Sequence, entry: PlanEntry, result: EntryResult) -> None:
        seq.num_confirmed = entry.start + entry.num_tokens
        if entry.prompt_logprobs_from is not None:
            seq.request.prompt_logprobs_done = min(seq.num_confirmed, seq.num_prompt_tokens - 1)
        if entry.sample:
            seq.num_pending -= 1
            seq.tokens.extend(result.tokens)
            self.stats.output_tokens += len(result.tokens)
        if seq.num_confirmed // self.cache.block_size > seq.kv.num_registered:
            self.cache.publish(seq.kv, seq.tokens, seq.num_confirmed)
        if len(self.cache.groups) > 1 or self.cache.groups[0].window is not None:
            self.cache.leave_window(seq.kv, seq.num_computed)
        if result.tokens or result.prompt_logprobs:
            self._updates.append(SequenceUpdate(
                seq.request, seq, result.tokens, result.logprobs, result.prompt_logprobs))
        if result.tokens:
            self._stop_if_done(seq)

    def _stop_if_done(self, seq: Sequence) -> None:
        request, params = seq.request, seq.request.params
        last = seq.tokens[-1]
        if params.stop_token_ids and last in params.stop_token_ids:
            self._finish(seq, FinishReason.STOP, last, silent=True)
        elif last in request.eos_token_ids and not params.ignore_eos:
            self._finish(seq, FinishReason.STOP, silent=True)
        elif len(seq.tokens) >= self._length_limit(seq):
            self._finish(seq, FinishReason.LENGTH, silent=True)

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None,
                error: str | None = None, silent: bool = False) -> None:
        """End one sequence; when it is its request's last, the request leaves. `silent`: news of it already goes out."""
        request = seq.request
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
        self._leave_row(seq)
        if not silent:
            self._updates.append(SequenceUpdate(request, seq, []))
        if request.finished:
            if request.status is Status.WAITING:
                self.waiting.remove(request)
            else:
                del self.running[request.request_id]
            request.status = Status.FINISHED
            del self._requests[request.request_id]
            if error is not None:
                self.stats.requests_failed += 1
            elif reason is FinishReason.ABORT:
                self.stats.requests_aborted += 1
            else:
                self.stats.requests_finished += 1

    # ---- self-examination

    def check(self) -> None:
        """Every invariant of the cache against the sequences that hold it; for idle moments and tests."""
        holders = [seq.kv for request in self._requests.values() for seq in request.sequences if not seq.finished]
        self.cache.check(holders + [seq.kv for seq in self._quarantined])
        taken = [seq.row for request in self.running.values() for seq in request.live]
        if sorted(taken + self._rows) != list(range(self.limits.max_num_seqs)):
            raise InvariantError("rows of the request table are lost or shared")
