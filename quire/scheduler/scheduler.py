"""Plans each step: who computes how many tokens, who waits, who is preempted; and takes in what came of it.

It knows no prefill phase and no decode phase, only sequences that know more tokens than they have KV for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from quire.errors import InvalidRequestError, InvariantError
from quire.kvcache.manager import Copy, KVCacheManager
from quire.kvcache.table import PrefixMatch, SequenceKV
from quire.scheduler.pacing import StepPacer
from quire.scheduler.plan import (
    BlockCopy,
    EntryResult,
    PlanEntry,
    RowStart,
    StepPlan,
    StepResult,
    TableDiff,
    TokenLogprobs,
)
from quire.scheduler.policy import BatchingPolicy, DecodeFirst, Phase
from quire.scheduler.queue import FCFSQueue, WaitingQueue
from quire.scheduler.request import FinishReason, Request, Sequence, Status
from quire.scheduler.step_cost import StepLoad

_EXAMINE_EVERY = 10.0
"""Seconds: a full check takes milliseconds for ten thousand blocks, too long for every pause."""


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
    invariant_errors: int = 0
    """Times that the bookkeeping contradicted itself; anything but 0 is a bug of ours."""


@dataclass(slots=True)
class SequenceUpdate:
    """News of one sequence, for whoever turns tokens into text."""

    request: Request
    sequence: Sequence
    new_tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


_Planned = tuple[Sequence, PlanEntry, Seq[Copy], int]
"""A plan entry with the sequence it speaks of, the copies that come first, and the sequence's epoch."""


@dataclass(slots=True)
class _Draft:
    """The step under construction."""

    budget: int
    load: StepLoad | None = None
    """What is planned so far, where a pacer wants to know."""
    decoding: list[Sequence] = field(default_factory=list)
    """Running sequences that lack one token; some may lose their row while the draft is made."""
    prefilling: list[Sequence] = field(default_factory=list)
    """Running sequences that lack more."""
    planned: dict[int, _Planned] = field(default_factory=dict)
    """By row, in the order of planning."""
    starts: list[RowStart] = field(default_factory=list)
    preempted: bool = False
    short: bool = False
    """A running sequence found no block, though some will come free when plans in flight are done."""


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
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.waiting = FCFSQueue() if queue is None else queue
        self.policy = DecodeFirst() if policy is None else policy
        self.running: dict[str, Request] = {}
        self.stats = SchedulerStats()
        self._max_len = min(limits.max_model_len, cache.max_tokens)
        self._clock = clock
        self._pacer = pacer
        self._requests: dict[str, Request] = {}
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed_rows: list[int] = []
        self._in_flight: deque[tuple[StepPlan, list[_Planned]]] = deque()
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
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", field="request_id")
        num_prompt = len(request.prompt_token_ids)
        self._refuse_unfit(num_prompt)
        max_tokens = request.params.max_tokens
        request.max_len = self._max_len if max_tokens is None else min(self._max_len, num_prompt + max_tokens)
        request.arrival_index = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def _refuse_unfit(self, num_prompt: int) -> None:
        limits, cache = self.limits, self.cache
        said = f"the prompt has {num_prompt} tokens"
        if num_prompt == 0:
            raise InvalidRequestError("the prompt is empty: give at least one token", field="prompt")
        if num_prompt >= limits.max_model_len:
            raise InvalidRequestError(
                f"{said}; with at least one to generate, max_model_len ({limits.max_model_len}) allows "
                f"{limits.max_model_len - 1}: shorten it or raise max_model_len", field="prompt")
        if num_prompt >= cache.max_tokens:
            raise InvalidRequestError(
                f"{said}; with at least one to generate, a pool of num_kv_blocks ({cache.num_blocks}) times "
                f"block_size ({cache.block_size}) allows {cache.max_tokens - 1}: shorten it or raise "
                "num_kv_blocks", field="prompt")
        if not limits.chunked_prefill and num_prompt > limits.max_num_batched_tokens:
            raise InvalidRequestError(
                f"{said} and chunked prefill is off, so max_num_batched_tokens "
                f"({limits.max_num_batched_tokens}) is its limit: turn chunked prefill on or raise it",
                field="prompt")

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
        draft = _Draft(self.limits.max_num_batched_tokens, None if self._pacer is None else StepLoad())
        self._sort_running(draft)
        for phase in self.policy.phases():
            if phase is Phase.ADMIT:
                self._admit(draft)
            else:
                self._continue_running(draft, draft.decoding if phase is Phase.DECODE else draft.prefilling)
            if not self.policy.goes_on(phase, self.limits.max_num_batched_tokens - draft.budget):
                break
        self._short = draft.short or draft.preempted
        if not draft.planned:
            return None
        return self._submit(draft)

    def _sort_running(self, draft: _Draft) -> None:
        for request in self.running.values():
            for seq in request.sequences:
                known = len(seq.tokens) + seq.num_pending
                todo = known - seq.num_computed
                # Without a row it is finished; at its longest with tokens in flight, it only waits for those.
                if seq.row < 0 or todo < 1 or (known >= request.max_len and seq.num_pending):
                    continue
                (draft.decoding if todo == 1 else draft.prefilling).append(seq)

    def _continue_running(self, draft: _Draft, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if draft.budget <= 0:
                return
            if seq.row >= 0:
                self._continue(draft, seq)

    def _continue(self, draft: _Draft, seq: Sequence) -> None:
        start = seq.num_computed
        todo = len(seq.tokens) + seq.num_pending - start
        tokens = 1 if todo == 1 else self._chunk(draft, seq, start, todo)
        if tokens == 0:
            return
        while True:
            try:
                copies = self.cache.extend(seq.kv, start + tokens, start)
            except InvariantError as error:
                self._quarantine(seq, error)
                return
            if copies is not None:
                self._plan(draft, seq, tokens, copies)
                return
            if self.cache.waits_for_limbo:
                draft.short = True
                return
            victim = self._victim()
            self._preempt(draft, victim)
            if victim is seq.request:
                return

    def _admit(self, draft: _Draft) -> None:
        # Memory taken back for running sequences is theirs first: else a newcomer takes it again, for ever.
        if (self._short and self.running) or not self.policy.admits(len(self.running)):
            return
        while draft.budget > 0 and self._rows and len(self.waiting) and not draft.preempted:
            request = self.waiting.peek()
            seq = request.live[0]
            match = self._match(seq)
            todo = len(seq.tokens) - match.num_tokens
            tokens = self._first_chunk(draft, seq, match.num_tokens, todo)
            # One slot more than is known: who cannot even hold the next token would be preempted at once.
            if tokens == 0 or not self.cache.fits(min(len(seq.tokens) + 1, self._max_len), match, tokens):
                return
            self._start(draft, request, seq, match, tokens)

    def _match(self, seq: Sequence) -> PrefixMatch:
        request = seq.request
        wants_logprobs = request.params.prompt_logprobs is not None
        if wants_logprobs and request.prompt_logprobs_done < seq.num_prompt_tokens - 1:
            # Their log-probabilities need the logits of every prompt token, cached or not.
            return self.cache.no_match()
        return self.cache.match(seq.kv, seq.tokens)

    def _start(self, draft: _Draft, request: Request, seq: Sequence, match: PrefixMatch, tokens: int) -> None:
        try:
            self.cache.open(seq.kv, match)
            copies = self.cache.extend(seq.kv, match.num_tokens + tokens, match.num_tokens)
            if copies is None:
                raise InvariantError("the cache promised room for a sequence and then had none")
        except InvariantError as error:
            self._quarantine(seq, error)
            return
        self.waiting.pop()
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

    def _plan(self, draft: _Draft, seq: Sequence, tokens: int, copies: Seq[Copy]) -> None:
        start = seq.num_computed
        end = start + tokens
        entry = PlanEntry(seq.row, start, tokens, end == len(seq.tokens) + seq.num_pending)
        if start < seq.num_prompt_tokens - 1 and seq.request.params.prompt_logprobs is not None:
            first = max(start, seq.request.prompt_logprobs_done)
            entry.prompt_logprobs_from = first if first < min(end, seq.num_prompt_tokens - 1) else None
        draft.planned[seq.row] = (seq, entry, copies, seq.epoch)
        draft.budget -= tokens
        if draft.load is not None:
            _add_load(draft.load, seq, entry)

    def _submit(self, draft: _Draft) -> StepPlan:
        """Turn the draft into a plan and move the sequences' progress to its end."""
        self._steps += 1
        plan = StepPlan(self._steps, freed_rows=self._freed_rows, starts=draft.starts)
        self._freed_rows = []
        planned = list(draft.planned.values())
        plan.entries = [entry for _, entry, _, _ in planned]
        for seq, entry, copies, _ in planned:
            if copies:
                plan.copies.extend(BlockCopy(*copy) for copy in copies)
            for table in seq.kv.tables:
                if table.dirty_from < len(table.blocks):
                    plan.diffs.extend(_table_diffs(seq))
                    break
            start = entry.start
            seq.num_computed = end = start + entry.num_tokens
            if start < seq.num_prompt_tokens:
                self.stats.prompt_tokens += min(end, seq.num_prompt_tokens) - start
            if entry.sample:
                seq.num_pending += 1
        self._in_flight.append((plan, planned))
        self.cache.steps_submitted(plan.step)
        self.stats.steps += 1
        if self._pacer is not None and draft.load is not None:
            self._pacer.submitted(draft.load)
        return plan

    def _chunk(self, draft: _Draft, seq: Sequence, start: int, todo: int) -> int:
        """How many of `todo` tokens from `start` on to compute now; 0: none."""
        threshold = self.limits.long_prefill_token_threshold
        tokens = min(todo, draft.budget, threshold) if threshold else min(todo, draft.budget)
        if self._pacer is None or draft.load is None:
            return tokens
        return self._pacer.room(draft.load, start, tokens, seq.request.params.prompt_logprobs is not None)

    def _first_chunk(self, draft: _Draft, seq: Sequence, start: int, todo: int) -> int:
        """How many tokens of a waiting request to begin with; 0: not now."""
        # A preempted request may have outgrown the step that its prompt was admitted for.
        if not self.limits.chunked_prefill and not seq.request.num_preemptions:
            return todo if todo <= draft.budget else 0
        tokens = self._chunk(draft, seq, start, todo)
        if tokens < todo and self._partial_prefills(draft) >= self.limits.max_num_partial_prefills:
            return 0
        return tokens

    def _partial_prefills(self, draft: _Draft) -> int:
        """Running sequences that will still lack more than one token after what is planned for them."""
        count = 0
        for request in self.running.values():
            for seq in request.live:
                planned = draft.planned.get(seq.row)
                count += seq.num_to_compute - (planned[1].num_tokens if planned else 0) > 1
        return count

    # ---- preemption

    def _victim(self) -> Request:
        """The lowest in priority; among equals, the last to come."""
        return max(self.running.values(), key=lambda r: (r.priority, r.arrival_index))

    def _preempt(self, draft: _Draft, request: Request) -> None:
        """Take a request's memory away; it goes back to the head of the queue with the tokens it has."""
        draft.preempted = True
        for seq in request.live:
            planned = draft.planned.pop(seq.row, None)
            if planned is not None:
                draft.budget += planned[1].num_tokens
            draft.starts = [start for start in draft.starts if start.row != seq.row]
            error = self._leave_row(seq)
            if error is not None:
                self._finish(seq, FinishReason.ABORT, error=error)
        if draft.load is not None:
            draft.load = StepLoad()
            for planned in draft.planned.values():
                _add_load(draft.load, planned[0], planned[1])
        if request.finished:
            return
        del self.running[request.request_id]
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self.waiting.put_back(request)

    def _leave_row(self, seq: Sequence) -> str | None:
        """Give back row and blocks; says so if somebody else may have used the blocks meanwhile."""
        error = None
        try:
            self.cache.free(seq.kv)
        except InvariantError as broken:
            error = self._note_broken(broken)
        if seq.row >= 0:
            self._freed_rows.append(seq.row)
            self._rows.append(seq.row)
        seq.rewind()
        return error

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
        for (seq, entry, _, epoch), entry_result in zip(planned, result.entries, strict=True):
            # Who finished, or was preempted, after the plan was made has left this row.
            if seq.epoch == epoch:
                if entry_result.error is not None:
                    self._finish(seq, FinishReason.ABORT, error=entry_result.error)
                else:
                    self._take_in(seq, entry, entry_result)

    def fail_step(self, message: str) -> None:
        """The oldest step in flight was lost: its sequences end with an error, everyone else goes on."""
        for seq, _, _, epoch in self._retire_step():
            if seq.epoch == epoch:
                self._finish(seq, FinishReason.ABORT, error=message)

    def _retire_step(self) -> list[_Planned]:
        plan, planned = self._in_flight.popleft()
        if self._pacer is not None:
            self._pacer.done()
        try:
            self.cache.steps_done(plan.step)
        except InvariantError as error:
            self._note_broken(error)
        return planned

    def fail_stuck(self) -> None:
        """Requests are left, nothing is in flight, nothing could be planned: end the one in the way."""
        if self.examine():
            return
        request = self.waiting.peek() if len(self.waiting) else self._victim()
        for seq in request.live:
            self._finish(seq, FinishReason.ABORT, error="the KV pool has no room left for this request")

    def _take_in(self, seq: Sequence, entry: PlanEntry, result: EntryResult) -> None:
        end = seq.num_confirmed = entry.start + entry.num_tokens
        tokens = result.tokens
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

    def _stop_if_done(self, seq: Sequence) -> None:
        request, last = seq.request, seq.tokens[-1]
        if last in request.stop_ids:
            asked = last in (request.params.stop_token_ids or ())
            self._finish(seq, FinishReason.STOP, last if asked else None, silent=True)
        elif len(seq.tokens) >= request.max_len:
            self._finish(seq, FinishReason.LENGTH, silent=True)

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None,
                error: str | None = None, silent: bool = False) -> None:
        """End one sequence, and its request with the last one. `silent`: news of it goes out already."""
        broken = self._leave_row(seq)
        if broken is not None and error is None:
            reason, stop_reason, error = FinishReason.ABORT, None, broken
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
        if not silent:
            self._updates.append(SequenceUpdate(seq.request, seq, []))
        if seq.request.finished:
            self._part_with(seq.request)

    def _part_with(self, request: Request) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request.request_id]
        request.status = Status.FINISHED
        del self._requests[request.request_id]
        if any(seq.error is not None for seq in request.sequences):
            self.stats.requests_failed += 1
        elif any(seq.finish_reason is FinishReason.ABORT for seq in request.sequences):
            self.stats.requests_aborted += 1
        else:
            self.stats.requests_finished += 1

    # ---- self-examination

    def check(self) -> None:
        """Every invariant of the cache against the sequences that hold it; for idle moments and tests."""
        holders = [seq.kv for request in self._requests.values() for seq in request.live]
        self.cache.check(holders + self._quarantined)
        taken = [seq.row for request in self.running.values() for seq in request.live]
        if sorted(taken + self._rows) != list(range(self.limits.max_num_seqs)):
            raise InvariantError("rows of the request table are lost or shared")


def _add_load(load: StepLoad, seq: Sequence, entry: PlanEntry) -> None:
    """Count a planned entry among what the step costs."""
    rows = int(entry.sample)
    if entry.prompt_logprobs_from is not None:
        rows += min(entry.start + entry.num_tokens, seq.num_prompt_tokens - 1) - entry.prompt_logprobs_from
    streams = entry.num_tokens == 1 and entry.start >= seq.num_prompt_tokens
    load.add(entry.start, entry.num_tokens, rows, streams)


def _table_diffs(seq: Sequence) -> Iterator[TableDiff]:
    """What the worker does not know yet of a sequence's block tables."""
    for group, table in enumerate(seq.kv.tables):
        if table.dirty_from < len(table.blocks):
            start, blocks = table.take_dirty()
            yield TableDiff(seq.row, group, start, blocks)
