"""What callers get back: a request with its sequences, their text, tokens and log-probabilities, and when what
happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.scheduler.request import RequestCounts


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position, its rank there (1: likeliest), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""The token of a position first, then the likeliest ones, best first."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sequence as far as it had come: where it is kept, and how much of it was there. It only grows meanwhile."""

    whole_text: Callable[[], str]
    num_chars: int
    token_ids: list[int]
    logprobs: Callable[[int], list[PositionLogprobs]] | None
    """Describes so many positions."""
    num_logprobs: int
    num_tokens: int


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request, as far as it has come.

    `text`, `token_ids` and `logprobs` of one that was made by `at` are made when they are first read: whoever reads
    only what is new pays for nothing else.
    """

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
    _whole: Snapshot | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def at(cls, snapshot: Snapshot, index: int, cumulative_logprob: float | None, finish_reason: str | None,
           stop_reason: int | str | None, text_delta: str, token_ids_delta: list[int],
           score: float | None) -> CompletionOutput:
        """The sequence as it was at a snapshot."""
        made = cls(index, "", [], cumulative_logprob, None, finish_reason, stop_reason, text_delta, token_ids_delta,
                   score)
        del made.text, made.token_ids, made.logprobs
        made._whole = snapshot
        return made

    def __getattr__(self, name: str) -> object:
        """Called for fields that have no value yet."""
        whole = self._whole if name in ("text", "token_ids", "logprobs") else None
        if whole is None:
            raise AttributeError(name)
        if name == "text":
            self.text = whole.whole_text()[: whole.num_chars]
        elif name == "token_ids":
            self.token_ids = whole.token_ids[: whole.num_tokens]
        else:
            self.logprobs = None if whole.logprobs is None else whole.logprobs(whole.num_tokens)
        return object.__getattribute__(self, name)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_logprobs(self) -> int:
        """About how many log-probabilities `logprobs` holds; they are not made for that."""
        if self._whole is not None:
            return self._whole.num_logprobs
        return len(self.logprobs) * len(self.logprobs[0]) if self.logprobs else 0


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
