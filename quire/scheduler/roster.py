"""Who waits, whose KV is on its way, who runs and in which row: the moves between those, with what each gives up."""

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
from quire.structured.gate import GrammarGate, release_grammar, take_grammar


class Roster:
    """Every request that is not finished, in one place: compiling, waiting, arriving or running."""

    def __init__(self, cache: KVCacheManager, waiting: WaitingQueue, preemption: Preemption,
                 stats: SchedulerStats, num_rows: int) -> None:
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.arriving: dict[str, Request] = {}
        """Requests whose KV is on its way, or that a tier has been asked for. They have no row."""
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
        """Let requests wait their turn whose grammar has come; yields those whose grammar cannot be used, and why: from
        the beginning, or any more."""
        for request in self.compiling.settled():
            request.status = Status.WAITING
            self.waiting.add(request)
            error = take_grammar(request)
            if error is not None:
                yield request, error
        yield from self.compiling.failures(self.requests.values())

    def has_rows_for(self, request: Request) -> bool:
        """Are there as many rows as it wants, besides those that running groups will need?"""
        return self.rows.num_spare >= request.rows_wanted

    def arrive(self, request: Request) -> None:
        """Take the head of the queue out of it: that request waits for KV from now on, and blocks no other."""
        self.waiting.pop()
        self.await_kv(request)

    def await_kv(self, request: Request) -> None:
        request.status = Status.ARRIVING
        self.arriving[request.request_id] = request

    def seat(self, request: Request, sequences: list[Sequence]) -> None:
        """The request at the head of the queue, or one whose KV is there, runs from now on with these sequences."""
        if request.status is Status.ARRIVING:
            del self.arriving[request.request_id]
        else:
            self.waiting.pop()
        for seq in sequences:
            self.rows.take(seq)
        request.status = Status.RUNNING
        request.computes = False
        request.num_overtaken = 0
        request.fetch, request.reservation = None, None
        self.running[request.request_id] = request
        if sequences[0].held_at is not None:
            self.forking[request.request_id] = request

    # ---- out

    def victim(self) -> Request:
        """Whom to preempt: the lowest in priority; among equals, the last to come."""
        return max([*self.running.values(), *self._holding()], key=_rank)

    def _holding(self) -> list[Request]:
        """Arriving requests that hold memory, or will."""
        return [request for request in self.arriving.values() if request.fetch is not None]

    def gives_way(self, request: Request) -> Request | None:
        """Whom to preempt for a waiting request that goes before it; None if that would not help."""
        lower = [other for other in (*self.running.values(), *self._holding())
                 if self.waiting.outranks(request, other)]
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

    def put_back(self, request: Request) -> None:
        """An arriving request that holds nothing waits its turn again."""
        del self.arriving[request.request_id]
        request.fetch, request.reservation = None, None
        request.status = Status.WAITING
        self.waiting.put_back(request)

    def recall(self, request: Request, reason: PreemptionReason | None) -> InvariantError | None:
        """Take an arriving request's memory; it waits, and computes what it would have got. No reason: its KV did not
        come, which is no preemption."""
        error = self.release_arriving(request)
        if reason is not None:
            self._preemption.count(request, self._stats, reason)
        self.put_back(request)
        return error

    def release_arriving(self, request: Request) -> InvariantError | None:
        """Give up what an arriving request holds and waits for."""
        error = None
        request.lookups = None
        if request.fetch is not None:
            self._cache.transfers.cancel(request.fetch)
        if request.reservation is not None:
            self._cache.reservations.cancel(request.reservation)
        for seq in request.live:
            error = self.leave_row(seq) or error
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
        """Give back row and blocks; an error if another sequence may have used the blocks meanwhile."""
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
        elif request.status is Status.ARRIVING:
            self.release_arriving(request)
            del self.arriving[request.request_id]
        else:
            del self.running[request.request_id]
        self.forking.pop(request.request_id, None)
        self.forget_swapped(request)
        release_grammar(request)
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
        """Places, rows and blocks of tiers against those who hold them, in parts."""
        swapped = [r.swapped for r in self.requests.values() if r.swapped is not None]
        for tier in self._cache.tiers:
            held = [self._cache.transfers.held_in_tier(tier, group) for group in range(len(self._cache.groups))]
            for kv in swapped if tier is self._cache.swap_tier else ():
                for blocks, keys in zip(held, kv.keys, strict=True):
                    blocks.extend(keys)
            yield from tier.examination(held)
        places = [*self.running, *self.arriving, *(request.request_id for request in self.waiting),
                  *self.compiling.names]
        if sorted(places) != sorted(self.requests):
            raise InvariantError("a request is in no place, or in two")
        self.rows.check([seq.row for seq in self.live if seq.row >= 0], self.running.values())
        yield

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return [seq for request in self.requests.values() for seq in request.live]


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_index
