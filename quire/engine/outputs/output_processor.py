"""Turns what the engine says of one request into what its caller sees."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from quire.engine.outputs.detokenizer import TextDecoder
from quire.engine.outputs.news import News
from quire.engine.outputs.output import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from quire.engine.outputs.sequence_logprobs import describe
from quire.engine.outputs.sequence_state import SequenceState
from quire.errors import InvalidRequestError
from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import LogprobRecord

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(slots=True)
class OutputUpdate:
    """What one `process` call changed in one sequence."""

    index: int
    text_delta: str
    token_ids: list[int]
    """The new tokens that count: those after a stop string are dropped."""
    finish_reason: str | None
    stop_reason: int | str | None
    hit_stop_string: bool = False
    """The text ended the sequence, which the scheduler cannot know: finish it there."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class OutputProcessor:
    """The sequences of one request.

    `take` takes whatever came of one of them, `process` its tokens alone; `output` is the whole
    request so far. `tokenizer` None (or detokenize=False) leaves the text empty.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        tokenizer: TextDecoder | None,
        prompt_token_ids: Sequence[int],
        prompt: str | None = None,
        *,
        num_sequences: int | None = None,
        seed: int | None = None,
        arrival_time: float = 0.0,
    ) -> None:
        if tokenizer is None and params.stop_strings:
            raise InvalidRequestError(
                "stop needs a tokenizer, and this engine has none (skip_tokenizer_init): use stop_token_ids",
                field="stop",
            )
        self.request_id = request_id
        self.params = params
        self.prompt = prompt
        self.prompt_token_ids = list(prompt_token_ids)
        self.seed = seed
        self.num_cached_tokens: int | None = None
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.error: str | None = None
        self._tokenizer = tokenizer if params.detokenize else None
        count = num_sequences if num_sequences is not None else params.best_of or params.n
        self.silent_until_done = params.ranked or num_sequences is not None
        """Which sequences are returned, or what they are, is known only at the end."""
        self._sequences = [SequenceState(index, params, tokenizer) for index in range(count)]
        self.single = count == 1 and num_sequences is None
        """It has one sequence, which is drawn: `process_token` may be used."""
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        if self.single:
            return self._sequences[0].finish_reason is not None
        return all(state.finish_reason is not None for state in self._sequences)

    def take(self, news: News, now: float) -> str | None:
        """What the engine says of one sequence; the stop string that ended it here and not in the engine, if any."""
        if news.counts is not None:
            self.metrics.counts = news.counts
        if news.prompt_logprobs:
            self.add_prompt_logprobs(news.prompt_logprobs)
        if news.error is not None:
            self.error = news.error
        if news.score is not None:
            self.set_score(news.index, *news.score)
        if news.num_sequences:
            self.end_missing(range(news.num_sequences))
        change = self.process(news.tokens, news.logprobs, news.finish_reason, news.stop_reason, index=news.index,
                              now=now)
        if change.hit_stop_string and isinstance(change.stop_reason, str) and news.finish_reason is None:
            return change.stop_reason
        return None

    def started(self, when: float | None, num_cached_tokens: int | None) -> None:
        """Some of it is computed, and so much was found in cache."""
        self.metrics.first_scheduled_time = when
        self.num_cached_tokens = num_cached_tokens

    def process(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobRecord] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        *,
        index: int = 0,
        now: float | None = None,
    ) -> OutputUpdate:
        """Take new tokens of sequence `index`, and `finish_reason` if the scheduler ended it with them.

        With "stop" the last token is the one that stopped it (an end of sequence or a stop id). A stop string
        overrides the scheduler's reason; tokens of a sequence that has ended are ignored.
        """
        state = self._sequences[index]
        before = len(state.token_ids)
        text, hit = state.take(token_ids, logprobs, _plain_reason(finish_reason), stop_reason)
        if now is not None:
            self._note_time(now)
        return OutputUpdate(index, text, state.token_ids[before:], state.finish_reason, state.stop_reason, hit)

    def process_token(self, token_id: int, clock: Callable[[], float] = time.monotonic,
                      logprobs: LogprobRecord | None = None) -> str | None:
        """The short way for one token of the only sequence that came without anything else: what `process` does,
        for a tenth of the time. Returns the stop string that it completed, if any."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = clock()
        found = self._sequences[0].take_token(token_id, logprobs)
        if found is not None:
            self.metrics.finished_time = clock()
        return found

    def abort(self, error: str | None = None, now: float | None = None) -> list[OutputUpdate]:
        """End all sequences that still run; `error` says why, if it was the engine's doing."""
        self.error = error
        running = [state.index for state in self._sequences if state.finish_reason is None]
        return [self.process([], finish_reason="abort", index=index, now=now) for index in running]

    def add_prompt_logprobs(self, logprobs: Sequence[LogprobRecord]) -> None:
        """Log-probabilities of the next prompt tokens, in order, starting with the second token."""
        if self._prompt_logprobs is not None:
            count = self.params.prompt_logprobs or 0
            self._prompt_logprobs.extend(describe(entry, count, self._tokenizer) for entry in logprobs)

    def set_score(self, index: int, cumulative_logprob: float, score: float) -> None:
        """What beam search found for sequence `index`."""
        self._sequences[index].cumulative_logprob = cumulative_logprob
        self._sequences[index].score = score

    def end_missing(self, known: Collection[int]) -> None:
        """Sequences other than `known` never came to be: the request was ended before."""
        for state in self._sequences:
            if state.index not in known and state.finish_reason is None:
                state.take([], finish_reason="abort")

    def _completions(self, only_new: bool) -> list[CompletionOutput]:
        """All sequences; of those that are ranked the best n, when all have ended, and none before."""
        if self.silent_until_done and not self.finished:
            return []
        if only_new and not self.silent_until_done:
            return [state.new_part() for state in self._sequences if state.has_news]
        if not self.params.ranked:
            return [state.completion() for state in self._sequences]
        best = sorted(self._sequences, key=lambda state: -(state.cumulative_logprob or 0.0))[: self.params.n]
        return [replace(state.completion(), index=place) for place, state in enumerate(best)]

    def output(self, only_new: bool = False) -> RequestOutput:
        """The request as a whole, as far as it has come; deltas are since the previous call.

        With `only_new` the outputs are those sequences that have news, and each holds nothing else: `text`,
        `token_ids` and `logprobs` are what came since the previous call (sequences that are ranked come whole, at the
        end). The metrics are then the request's own, which go on changing.
        """
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._completions(only_new),
            finished=self.finished,
            prompt_logprobs=self._known_prompt_logprobs(),
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics if only_new else replace(self.metrics, counts=replace(self.metrics.counts)),
            seed=self.seed,
            error=self.error,
        )

    def _known_prompt_logprobs(self) -> list[PositionLogprobs | None] | None:
        """All outputs share the list once it is complete."""
        found = self._prompt_logprobs
        return found if found is None or len(found) == len(self.prompt_token_ids) else list(found)

    def _note_time(self, now: float) -> None:
        if self.metrics.first_token_time is None and any(state.token_ids for state in self._sequences):
            self.metrics.first_token_time = now
        if self.metrics.finished_time is None and self.finished:
            self.metrics.finished_time = now


def _plain_reason(reason: str | None) -> str | None:
    """The reason as a plain string, whether it came as one or as a member of an enumeration of strings."""
    value = reason.value if isinstance(reason, enum.Enum) else reason
    if value is not None and value not in FINISH_REASONS:
        raise ValueError(f"finish_reason must be one of {', '.join(FINISH_REASONS)}, not {value!r}")
    return value
