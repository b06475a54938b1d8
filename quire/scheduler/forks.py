"""When sequences of a group part: samples where the prompt ends, beams after every token."""

from __future__ import annotations

from quire.errors import InvariantError
from quire.scheduler.draft import Draft
from quire.scheduler.endings import Endings
from quire.scheduler.groups import fork_from, heir_of, inherit, reseat_beams, seat_hypotheses, unforked
from quire.scheduler.plan import EntryResult, PlanEntry
from quire.scheduler.request import FinishReason, Request, Sequence
from quire.scheduler.state import SchedulerState
from quire.scheduler.updates import SequenceUpdate


class Forks:
    def __init__(self, state: SchedulerState, endings: Endings) -> None:
        self._state = state
        self._endings = endings

    def plan(self, draft: Draft, seq: Sequence, entry: PlanEntry) -> None:
        """Plan an entry of a group's sequence."""
        request, end = seq.request, entry.start + entry.num_tokens
        if request.beams is not None:
            # The worker has not drawn these tokens: the search chose them.
            entry.given = tuple(seq.tokens[max(entry.start, seq.num_prompt_tokens) : end])
            entry.candidates = request.beams.num_candidates if entry.sample else 0
            entry.sample = draft.decodes_only = False
        draft.add(seq, entry)
        if entry.sample and end == seq.num_prompt_tokens:
            self._fork_at_prompt(draft, seq, end)

    def _fork_at_prompt(self, draft: Draft, leader: Sequence, end: int) -> None:
        """The leader's logits at the end of the prompt are everyone's: each sibling draws from them."""
        siblings = unforked(leader.request)
        if self._fork(leader, siblings, end):
            draft.decodes_only = False
            for seq in siblings:
                draft.add(seq, PlanEntry(seq.row, end, 0, True, shares=leader.row))

    def fork_resumed(self) -> None:
        """Siblings that had drawn tokens before a preemption begin again where the prompt ends."""
        roster = self._state.roster
        for request in list(roster.forking.values()):
            leader = request.live[0]
            # Not before that is confirmed: the leader may end, and siblings would trust a step that is lost later.
            if leader.num_confirmed >= leader.num_prompt_tokens:
                del roster.forking[request.request_id]
                self._fork(leader, unforked(request), leader.num_prompt_tokens)

    def _fork(self, leader: Sequence, siblings: list[Sequence], at: int) -> bool:
        try:
            fork_from(leader, siblings, at, self._state.cache, self._state.roster.rows)
        except InvariantError as error:
            self._endings.quarantine(leader, error)
            return False
        self._state.stats.forks += len(siblings)
        return True

    def hand_over(self, leader: Sequence) -> bool:
        """`leader` is about to be aborted: a fork that waits for it to finish the prompt takes its place.

        False if a fork waits and none of them can.
        """
        heir = heir_of(leader)
        return heir is None or inherit(leader, heir, self._state.cache, self._state.roster.rows)

    # ---- beams

    def report(self, seq: Sequence, result: EntryResult) -> None:
        """A beam has said what may follow it."""
        request = seq.request
        if request.beams is None or not result.candidates:
            self._endings.finish(seq, FinishReason.ABORT, error="the step of this request found no next tokens")
        elif request.beams.report(request.places.index(seq), result.candidates):
            self._advance_beams(request)

    def _advance_beams(self, request: Request) -> None:
        """All beams have reported what may follow them: choose, fork, free; or end the request."""
        beams = request.beams
        if beams is None:
            return
        choices = beams.advance(request.max_len - request.num_prompt_tokens)
        if beams.done:
            self._finish_beams(request)
            return
        state, roster = self._state, self._state.roster
        try:
            state.stats.forks += reseat_beams(request, choices, state.cache, roster.rows, roster.leave_row)
        except InvariantError as error:
            self._endings.quarantine(request.live[0], error)

    def _finish_beams(self, request: Request) -> None:
        """The sequences become the complete beams, best first."""
        for seq, hypothesis in seat_hypotheses(request):
            self._state.stats.output_tokens += len(hypothesis.tokens)
            self._endings.updates.append(SequenceUpdate(request, seq, hypothesis.tokens))
            reason = FinishReason.STOP if hypothesis.ended else FinishReason.LENGTH
            self._endings.finish(seq, reason, silent=True)
