"""Preemption: which running request gives its blocks to another and goes back to the queue."""

from __future__ import annotations

from collections.abc import Callable

from quire.scheduler.draft import Draft
from quire.scheduler.endings import Endings
from quire.scheduler.preemption import PreemptionReason
from quire.scheduler.request import FinishReason, Request, Status
from quire.scheduler.state import SchedulerState


class GivingWay:
    def __init__(self, state: SchedulerState, endings: Endings) -> None:
        self._state = state
        self._endings = endings
        self.on_preempt: Callable[[Request, PreemptionReason], None] | None = None
        """Told of every preemption, once it is done."""

    def make_way(self, draft: Draft, request: Request) -> bool:
        """Preempt for a waiting request that goes before a running one; false if there is none to preempt."""
        state = self._state
        victim = None if state.cache.room_is_coming else state.roster.gives_way(request)
        if victim is None:
            return False
        draft.made_way.append(victim)
        self.preempt(draft, victim, PreemptionReason.PRIORITY)
        return True

    def preempt(self, draft: Draft, request: Request, reason: PreemptionReason) -> None:
        """Take a request's memory away; it goes back to the head of the queue with the tokens it has."""
        draft.preempted |= reason is PreemptionReason.MEMORY
        draft.drop(request)
        # Alone and still short: its KV would come back to the same pool and be short again.
        alone = len(self._state.roster.running) + len(self._state.roster.arriving) <= 1
        self.requeue(request, reason, may_move=not alone or reason is PreemptionReason.PRIORITY)

    def requeue(self, request: Request, reason: PreemptionReason, may_move: bool) -> None:
        if self._state.speculator is not None:
            self._state.speculator.preempted()
        if request.status is Status.ARRIVING:
            error = self._state.roster.recall(request, reason)
        else:
            error = self._state.roster.requeue(request, reason, may_move)
        if self.on_preempt is not None:
            self.on_preempt(request, reason)
        if error is not None:
            self._endings.finish(request.live[0], FinishReason.ABORT, error=self._endings.note_broken(error))
