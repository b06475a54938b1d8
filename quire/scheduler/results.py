"""Processes a step's result for one sequence: confirms KV, appends tokens, publishes blocks, recognises the end."""

from __future__ import annotations

from quire.errors import InvariantError
from quire.scheduler.endings import Endings
from quire.scheduler.forks import Forks
from quire.scheduler.plan import EntryResult, PlanEntry
from quire.scheduler.remote import FirstToken
from quire.scheduler.request import FinishReason, Sequence
from quire.scheduler.state import SchedulerState
from quire.scheduler.updates import SequenceUpdate, cut_at_stop
from quire.structured.gate import GRAMMAR_END, grammar_over


class Results:
    def __init__(self, state: SchedulerState, endings: Endings, forks: Forks) -> None:
        self._state = state
        self._endings = endings
        self._forks = forks

    def take_in(self, seq: Sequence, entry: PlanEntry, result: EntryResult) -> None:
        state = self._state
        if result.error is not None:
            self._endings.finish(seq, FinishReason.ABORT, error=result.error)
            return
        end, tokens = entry.start + entry.num_tokens, result.tokens
        if state.tells_speculator and state.speculator is not None and entry.sample and tokens:
            accepted = len(tokens) - 1
            if accepted:
                cut_at_stop(result, seq.request.stop_ids)
            state.speculator.took(seq, entry, result, accepted)
            if entry.num_tokens > 1 and entry.num_drafts:  # Drafts rejected, or after the end, have no KV.
                entry.judged = result.num_drafts, result.parents, result.kept[: len(tokens)]
                end = seq.num_computed = entry.start + len(tokens)
        seq.num_confirmed = end
        if entry.prompt_logprobs_from is not None:
            seq.request.prompt_logprobs_done = min(end, seq.num_prompt_tokens - 1)
        if entry.sample:
            if not tokens:
                self._endings.finish(seq, FinishReason.ABORT, error="the step of this request drew no token for it")
                return
            seq.num_pending -= 1
            seq.tokens.extend(tokens)
            state.stats.output_tokens += len(tokens)
        if tokens or result.prompt_logprobs:
            self._endings.updates.append(
                SequenceUpdate(seq.request, seq, tokens, result.logprobs, result.prompt_logprobs))
        if not self._publish(seq, end):
            return
        if tokens:
            self._stop_if_done(seq)
        elif entry.candidates and seq.request.beams is not None:
            self._forks.report(seq, result)

    def take_first_token(self, seq: Sequence, first: FirstToken) -> None:
        """Append the first token, drawn by the engine that computes the prompt. It stands even if the KV is lost."""
        seq.own_tokens()
        seq.tokens.append(first.token)
        seq.num_computed = seq.num_prompt_tokens
        self._state.stats.output_tokens += 1
        if first.prompt_logprobs:
            seq.request.prompt_logprobs_done = seq.num_prompt_tokens - 1
        self._endings.updates.append(
            SequenceUpdate(seq.request, seq, [first.token], first.logprobs, first.prompt_logprobs))
        self._stop_if_done(seq)

    def _publish(self, seq: Sequence, end: int) -> bool:
        cache = self._state.cache
        try:
            if end // cache.block_size > seq.kv.num_registered:
                cache.publish(seq.kv, seq.tokens, end)
            if cache.has_windows:
                # Drafts in flight may be rejected: the token after them would then see earlier blocks.
                ahead = min(seq.num_computed, seq.num_tokens - 1) if seq.num_pending else seq.num_computed
                kept_at = seq.request.windows_kept_at
                cache.leave_window(seq.kv, ahead if kept_at is None else min(ahead, kept_at))
        except InvariantError as error:
            self._endings.quarantine(seq, error)
            return False
        return True

    def _stop_if_done(self, seq: Sequence) -> None:
        request, last = seq.request, seq.tokens[-1]
        if last in request.stop_ids:
            self._endings.finish(seq, FinishReason.STOP, request.named_stop(last), silent=True)
        elif grammar_over(seq):
            self._endings.finish(seq, FinishReason.STOP, GRAMMAR_END, silent=True)
        elif len(seq.tokens) >= request.max_len:
            self._endings.finish(seq, FinishReason.LENGTH, silent=True)
