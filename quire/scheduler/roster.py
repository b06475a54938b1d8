"""Who waits, who runs and in which row: the moves between those, with what each gives up on the way."""

from __future__ import annotations

from collections.abc import Iterator

from quire.errors import InvariantError
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.groups import extra_blocks
from quire.scheduler.preemption import Preemption, PreemptionReason
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.request import FinishReason, Request, Sequence, Status
from quire.scheduler.rows import RowBook
from quire.scheduler.stats import SchedulerStats
from quire.structured.gate import GrammarGate, take_grammar


class Roster:
    """Every request that is not finished, in one of two places."""

    def __init__(self, cache: KVCacheManager, waiting: WaitingQueue, preemption: Preemption,
                 stats: SchedulerStats, num_rows: int) -> None:
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.waiting = waiting
        self.compiling = GrammarGate()
        """Requests whose grammar is not there yet."""
        self.rows = RowBook(num_rows)
        self.forking: dict[str, Request] = {}
        """Resumed groups whose siblings wait for the leader to reach the end of the prompt again."""
        self._cache = cache
        self._preemption = preemption
        self._stats = stats

    # ---- in

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if request.grammar is not None:
            request.status = Status.COMPILING
            self.compiling.add(request)
        else:
            self.waiting.add(request)

    def queue_compiled(self) -> Iterator[tuple[Request, str]]:
        """Let requests wait their turn whose grammar has come; yields those whose grammar cannot be used, and why."""
        for request in self.compiling.settled():
            request.status = Status.WAITING
            self.waiting.add(request)
            error = take_grammar(request)
            if error is not None:
                yield request, error

    def has_rows_for(self, request: Request) -> bool:
        """Running groups will need rows for sequences not forked yet: those are not free."""
        owed = sum(other.rows_wanted - sum(seq.row >= 0 for seq in other.sequences)
                   for other in self.running.values() if other.width > 1)
        return self.rows.num_free - owed >= request.rows_wanted

    def seat(self, request: Request, sequences: list[Sequence]) -> None:
        """The request at the head of the queue runs from now on, with these sequences."""
        self.waiting.pop()
        for seq in sequences:
            self.rows.take(seq)
        request.status = Status.RUNNING
        self.running[request.request_id] = request
        if sequences[0].held_at is not None:
            self.forking[request.request_id] = request

    # ---- out

    def victim(self) -> Request:
        """Whom to preempt: the lowest in priority; among equals, the last to come."""
        return max(self.running.values(), key=_rank)

    def gives_way(self, request: Request) -> Request | None:
        """Whom to preempt for a waiting request that goes before it; None if that would not help."""
        lower = [other for other in self.running.values() if self.waiting.outranks(request, other)]
        if not lower:
            return None
        wanted = self._cache.blocks_for(len(request.live[0].tokens) + 1) + extra_blocks(request, self._cache)
        for group, pool in enumerate(self._cache.pools):
            # An estimate from above: blocks that several hold are counted for each.
            held = sum(len(seq.kv.tables[group].blocks)
                       for other in lower for seq in other.live if seq.kv.tables)
            if pool.num_available + held < min(wanted, pool.num_blocks):
                return None
        return max(lower, key=_rank)

    def requeue(self, request: Request, reason: PreemptionReason, may_move: bool) -> InvariantError | None:
        """Take a running request's rows and memory; it waits with the tokens it has, its KV moved or lost.

        An error means that its memory was not its own: it must end.
        """
        members = request.live
        error = self._unseat_early_siblings(request)
        kept = [seq.num_keepable if seq.row >= 0 else 0 for seq in members]
        try:
            request.swapped = self._preemption.move_out(request) if may_move else None
        except InvariantError as broken:
            error = broken
        for seq in members:
            error = self.leave_row(seq) or error
        if request.swapped is not None:
            for seq, num_tokens in zip(members, kept, strict=True):
                seq.num_computed = seq.num_confirmed = num_tokens
        if request.beams is not None:
            request.beams.forget_reports()
        self.forking.pop(request.request_id, None)
        del self.running[request.request_id]
        request.status = Status.WAITING
        self._preemption.count(request, self._stats, reason)
        self.waiting.put_back(request)
        return error

    def _unseat_early_siblings(self, request: Request) -> InvariantError | None:
        """Who was forked from a prompt that is not known to be computed would compute the rest of it once more each:
        they are forked from the leader again when it gets there."""
        error = None
        for seq in request.live[1:] if request.beams is None else ():
            if seq.row >= 0 and seq.num_keepable < seq.num_prompt_tokens:
                error = self.leave_row(seq) or error
        return error

    def leave_row(self, seq: Sequence) -> InvariantError | None:
        """Give back row and blocks; an error if somebody else may have used the blocks meanwhile."""
        error = None
        try:
            self._cache.free(seq.kv)
        except InvariantError as broken:
            error = broken
        seq.request.counts.copies_on_write += seq.kv.num_copies
        seq.kv.num_copies = 0
        self.rows.leave(seq)
        seq.rewind()
        return error

    def forget_swapped(self, request: Request) -> None:
        """What a request had on the host is given up: it ends, or computes it again."""
        if request.swapped is not None and self._preemption.swapper is not None:
            self._preemption.swapper.forget(request.swapped)
            request.swapped = None
            for seq in request.live:
                seq.num_computed = seq.num_confirmed = 0

    def part_with(self, request: Request) -> None:
        """All its sequences have ended."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.COMPILING:
            self.compiling.remove(request)
        else:
            del self.running[request.request_id]
        self.forking.pop(request.request_id, None)
        self.forget_swapped(request)
        request.status = Status.FINISHED
        del self.requests[request.request_id]
        if any(seq.error is not None for seq in request.sequences):
            self._stats.requests_failed += 1
        elif any(seq.finish_reason is FinishReason.ABORT for seq in request.sequences):
            self._stats.requests_aborted += 1
        else:
            self._stats.requests_finished += 1

    # ---- self-examination

    def examination(self) -> Iterator[None]:
        """Rows and host blocks against those who hold them, in parts."""
        if self._cache.tier is not None:
            swapped = [r.swapped for r in self.requests.values() if r.swapped is not None]
            yield from self._cache.tier.examination([[block for kv in swapped for block in kv.keys[group]]
                                                     for group in range(len(self._cache.groups))])
        self.rows.check([seq.row for seq in self.live if seq.row >= 0])
        yield

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return [seq for request in self.requests.values() for seq in request.live]


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_index
