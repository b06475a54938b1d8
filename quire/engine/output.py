"""What callers get back: tokens as text, stop strings obeyed, log-probabilities with their words."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from quire.engine.detokenizer import StopStrings, TextDecoder, make_detokenizer
from quire.errors import InvalidRequestError
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import TokenLogprobs
from quire.scheduler.request import RequestCounts

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position, its rank there (1: likeliest), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""The token of a position first, then the likeliest ones, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request, as far as it has come."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """stop, length or abort; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end."""
    text_delta: str = ""
    """The end of `text` that is new since the request's previous output: join them for a stream."""
    token_ids_delta: list[int] = field(default_factory=list)
    score: float | None = None
    """Of a beam: its cumulative log-probability after the length penalty, by which beams are ranked."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    counts: RequestCounts = field(default_factory=RequestCounts)
    """Preemptions by reason, swaps and bytes moved, copies on write, tokens computed again, tier hits."""

    @property
    def queue_time(self) -> float | None:
        """From arrival until some of it was first computed."""
        return self._since_arrival(self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        return self._since_arrival(self.first_token_time)

    @property
    def latency(self) -> float | None:
        return self._since_arrival(self.finished_time)

    def _since_arrival(self, time: float | None) -> float | None:
        return None if time is None else time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request with all its sequences so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    seed: int | None = None
    """The seed its tokens were drawn with, also where none was asked for: pass it to get the same tokens."""
    error: str | None = None
    """Why the request was ended by the engine (finish_reason abort); None when all went well."""


@dataclass(slots=True)
class OutputUpdate:
    """What one `process` call changed in one sequence."""

    index: int
    text_delta: str
    token_ids: list[int]
    """The new tokens that count: those after a stop string are dropped."""
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    hit_stop_string: bool = False
    """The text ended the sequence, which the scheduler cannot know: finish it there."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class SequenceText:
    """Text of one sequence: detokenized, checked for stop strings, in pieces and as a whole."""

    __slots__ = ("_detokenizer", "_include_stop", "_min_tokens", "_num_tokens", "_pieces", "_stops")

    def __init__(self, params: SamplingParams, tokenizer: TextDecoder | None) -> None:
        self._detokenizer = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = make_detokenizer(tokenizer, params.skip_special_tokens)
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop_strings, self._include_stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Text that may be shown after one more token; see `stop_string` for whether it is the last."""
        self._num_tokens += 1
        if self._detokenizer is None:
            return ""
        return self._show(self._detokenizer.push(token_id))

    def push_stop_token(self, token_id: int) -> str:
        """The token that ended the sequence: not part of the text unless asked for."""
        if self._include_stop:
            return self.push(token_id)
        self._num_tokens += 1
        return ""

    def finish(self) -> str:
        """The rest of the text, now that no token will follow."""
        if self._detokenizer is None or self._stops.matched is not None:
            return ""
        rest = self._show(self._detokenizer.finish())
        if self._stops.matched is None:
            held = self._stops.finish()
            self._pieces.append(held)
            rest += held
        return rest

    def _show(self, text: str) -> str:
        shown = self._stops.push(text, armed=self._num_tokens >= self._min_tokens) if text else ""
        if shown:
            self._pieces.append(shown)
        return shown


class SequenceState:
    """One sequence between two steps: what its caller has seen, and whether it is over."""

    __slots__ = (
        "_new_text",
        "_num_reported",
        "_params",
        "_reported_end",
        "_text",
        "_tokenizer",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "score",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, index: int, params: SamplingParams, tokenizer: TextDecoder | None) -> None:
        self.index = index
        self.token_ids: list[int] = []
        wanted = params.logprobs is not None
        self.logprobs: list[PositionLogprobs] | None = [] if wanted else None
        self.cumulative_logprob: float | None = 0.0 if wanted or params.ranked else None
        self.score: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._text = SequenceText(params, tokenizer)
        self._new_text: list[str] = []
        self._num_reported = 0
        self._reported_end = False

    @property
    def has_news(self) -> bool:
        """Something of it has not been in an output of its own yet."""
        return (self._num_reported < len(self.token_ids) or any(self._new_text)
                or (self.finish_reason is not None and not self._reported_end))

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> tuple[str, bool]:
        """The text that new tokens give, and whether a stop string ended the sequence with them."""
        if self.finish_reason is not None:
            return "", False
        # A text as the reason is no token's doing.
        by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        text, kept = self._add_text(token_ids, stopped_by_token=by_token)
        if self._text.stop_string is None and finish_reason is not None:
            text += self._text.finish()
        self._new_text.append(text)
        self.token_ids.extend(token_ids[:kept])
        if self.cumulative_logprob is not None and logprobs is not None:
            count = self._params.logprobs or 0
            if self.logprobs is not None:
                self.logprobs.extend(describe(entry, count, self._tokenizer) for entry in logprobs[:kept])
            added = sum(entry.logprob for entry in logprobs[:kept])
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + added
        found = self._text.stop_string
        self.finish_reason = finish_reason if found is None else "stop"
        self.stop_reason = stop_reason if found is None else found
        return text, found is not None

    def take_token(self, token_id: int) -> str | None:
        """As `take` for one token without log-probabilities that ends nothing; the stop string it completed."""
        if self.finish_reason is not None:
            return None
        self.token_ids.append(token_id)
        self._new_text.append(self._text.push(token_id))
        found = self._text.stop_string
        if found is not None:
            self.finish_reason, self.stop_reason = "stop", found
        return found

    def new_part(self) -> CompletionOutput:
        """What is new since this or `completion` was last asked, and nothing else."""
        delta = self._new_text[0] if len(self._new_text) == 1 else "".join(self._new_text)
        self._new_text = []
        self._reported_end = self.finish_reason is not None
        start, self._num_reported = self._num_reported, len(self.token_ids)
        tokens = self.token_ids[start:]
        logprobs = None if self.logprobs is None else self.logprobs[start:]
        return CompletionOutput(self.index, delta, tokens, self.cumulative_logprob, logprobs, self.finish_reason,
                                self.stop_reason, delta, tokens, self.score)

    def completion(self) -> CompletionOutput:
        """The sequence so far, with what is new since this was last asked."""
        delta, self._new_text = "".join(self._new_text), []
        start, self._num_reported = self._num_reported, len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self._text.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text_delta=delta,
            token_ids_delta=self.token_ids[start:],
            score=self.score,
        )

    def _add_text(self, token_ids: Sequence[int], stopped_by_token: bool) -> tuple[str, int]:
        """Detokenize up to a stop string; the text, and how many tokens it took."""
        text, last = "", len(token_ids) - 1
        for place, token in enumerate(token_ids):
            push = self._text.push_stop_token if stopped_by_token and place == last else self._text.push
            text += push(token)
            if self._text.stop_string is not None:
                return text, place + 1
        return text, len(token_ids)


def describe(entry: TokenLogprobs, count: int, tokenizer: TextDecoder | None) -> PositionLogprobs:
    """The log-probabilities of one position, with the words of their tokens."""

    def word(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    position = {entry.token_id: Logprob(entry.logprob, entry.rank, word(entry.token_id))}
    best = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
    for rank, (token, logprob) in enumerate(best, start=1):
        if token not in position:
            position[token] = Logprob(logprob, rank, word(token))
    return position


class OutputProcessor:
    """Turns the tokens of one request into what its caller sees.

    `process` takes the new tokens of one of its sequences and says what came of them; `output` is the whole
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
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        return all(state.finish_reason is not None for state in self._sequences)

    def process(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
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
        new = state.logprobs[before:] if state.logprobs is not None else None
        return OutputUpdate(
            index, text, state.token_ids[before:], new, state.finish_reason, state.stop_reason, hit
        )

    def process_token(self, token_id: int) -> str | None:
        """The short way for one token of the only sequence that came without anything else: what `process` does,
        for a tenth of the time. Returns the stop string that it completed, if any."""
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()
        found = self._sequences[0].take_token(token_id)
        if found is not None:
            self.metrics.finished_time = time.monotonic()
        return found

    def abort(self, error: str | None = None, now: float | None = None) -> list[OutputUpdate]:
        """End all sequences that still run; `error` says why, if it was the engine's doing."""
        self.error = error
        running = [state.index for state in self._sequences if state.finish_reason is None]
        return [self.process([], finish_reason="abort", index=index, now=now) for index in running]

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
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
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics if only_new else replace(self.metrics, counts=replace(self.metrics.counts)),
            seed=self.seed,
            error=self.error,
        )

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
