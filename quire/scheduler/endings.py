"""How sequences end: done, aborted, in error, or because the bookkeeping around them broke."""

from __future__ import annotations

from quire.errors import InvariantError
from quire.kvcache.table import SequenceKV
from quire.scheduler.request import FinishReason, Sequence
from quire.scheduler.state import SchedulerState
from quire.scheduler.updates import SequenceUpdate


class Endings:
    """Ends sequences, and their request with the last one; keeps what has to be told of that."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.updates: list[SequenceUpdate] = []
        self.quarantined: list[SequenceKV] = []
        """Blocks whose bookkeeping is inconsistent: not handed out again until the cache is reset."""
        self.broken = False

    def take_updates(self) -> list[SequenceUpdate]:
        updates, self.updates = self.updates, []
        return updates

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None,
               error: str | None = None, silent: bool = False) -> None:
        """End one sequence, and its request with the last one. `silent`: news of it goes out already."""
        roster, speculator = self._state.roster, self._state.speculator
        if error is None and reason is not FinishReason.ABORT:
            self._keep(seq)
        broken = roster.leave_row(seq)
        if broken is not None:
            said = self.note_broken(broken)
            reason, stop_reason, error = FinishReason.ABORT, None, error or said
        seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
        if speculator is not None:
            speculator.forget(seq)
        if not silent:
            self.updates.append(SequenceUpdate(seq.request, seq, []))
        if seq.request.finished:
            roster.part_with(seq.request)
        elif error is not None:
            # A group ends as one.
            for other in seq.request.live[:1]:
                self.finish(other, FinishReason.ABORT, error=error)

    def _keep(self, seq: Sequence) -> None:
        """Report the blocks that the sequence leaves, and lease them to the engine that is to fetch them."""
        state, request = self._state, seq.request
        if not seq.kv.tables:
            return
        state.cache.events.finished(seq.kv)
        if request.lease_seconds is not None and seq.row >= 0:
            confirmed = seq.num_confirmed
            lease = state.cache.leases.grant(seq.kv, confirmed, state.clock() + request.lease_seconds)
            seq.lease = lease.number

    def quarantine(self, seq: Sequence, error: InvariantError) -> None:
        """End the sequence around which it broke, keep its blocks out of circulation, go on serving."""
        self.quarantined.append(seq.kv)
        seq.kv = SequenceKV(seq.kv.key)
        self.finish(seq, FinishReason.ABORT, error=self.note_broken(error))

    def note_broken(self, error: InvariantError) -> str:
        self.broken = True
        self._state.stats.invariant_errors += 1
        return f"internal error, the request was stopped: {error}"
