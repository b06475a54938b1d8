"""What a front door and an engine in another process say to each other: typed, checked on arrival, never pickled.

Requests go by a number (`handle`) that the front door counts up for the life of an engine process, so news of an
ended request can never be taken for news of another that has its name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.request import RequestCounts

Plain = str | int | float | bool | dict[str, Any] | None

# ---- to the engine


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: what to build. `options` are the keywords of `LLM`."""

    options: dict[str, Plain]


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A new request. Its body is decoded by itself, so that a malformed one fails alone."""

    handle: int
    body: msgspec.Raw


class RequestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the engine must know of a request: tokens, no text."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival_time: float
    beams: BeamSearchParams | None = None
    bad_words: list[list[int]] = []
    priority: int = 0
    cache_key: bytes = b""
    tenant: str = ""
    prefill: list[str] | None = None
    """Engines that are asked for the prompt; None: those that are configured, if any."""


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Abort these requests."""

    handles: list[int]


class Finish(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """A stop string, which only a front door can see, has ended a sequence."""

    handle: int
    index: int
    stop: str


class Call(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """A question between two steps: "metrics", "check" or "clear_prefix_cache"."""

    number: int
    name: str


class Watch(msgspec.Struct, tag="watch", array_like=True, frozen=True):
    """Send view frames for the next `seconds`; the first is a full one if `fresh`. The watcher repeats this message:
    frames stop by themselves when it does not, so no message is needed to end them."""

    seconds: float
    fresh: bool = False
    engine: int = 0
    """Its number among those that are looked at together."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Stop now. A front that wants to drain does so before it sends this."""


ToEngine = Start | Add | Abort | Finish | Call | Watch | Shutdown

# ---- from the engine


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The model is loaded; what front doors must know of it."""

    model_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    metrics: dict[str, int | float]
    """All counters and gauges as they begin."""
    kv_listens: tuple[str, int] | None = None
    """Where other engines reach this one, if it computes prompts for them."""


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not be built, or broke: the last message. `kind` is the name of a class of quire.errors."""

    kind: str
    message: str
    field: str | None = None


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A request that was not taken in."""

    handle: int
    message: str
    field: str | None = None
    invalid: bool = True
    """The request's own fault; else ours."""


class SequenceNews(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What became of one sequence, where it is more than one plain token."""

    handle: int
    index: int
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[LogprobRecord] | None = None
    prompt_logprobs: list[LogprobRecord] | None = None
    score: tuple[float, float] | None = None
    """Of a complete beam: its cumulative log-probability, and that after the length penalty."""
    counts: RequestCounts | None = None
    """At the end of a sequence."""
    num_sequences: int = 0
    """How many the request has come to, where that says which of its beams will never be."""


class Started(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request has left the queue for the first time."""

    handle: int
    time: float
    num_cached_tokens: int


class StepStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step in numbers. Times are seconds; `began` is of the system's monotonic clock."""

    step: int
    began: float
    plan_seconds: float
    execute_seconds: float
    update_seconds: float
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    running: int
    waiting: int
    kv_usage: float
    """Share of the KV blocks that sequences hold."""

    @property
    def seconds(self) -> float:
        return self.plan_seconds + self.execute_seconds + self.update_seconds


class StepOutputs(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """All that one step brought, for all requests: one message. The common case, one token of a request's only
    sequence (and its log-probabilities), is a place in parallel lists."""

    handles: list[int]
    tokens: list[int]
    news: list[SequenceNews]
    started: list[Started]
    taken: int
    """The highest handle that the engine had taken in before this step."""
    unfinished: int
    """Requests that it still has."""
    stats: StepStats | None = None
    metrics: dict[str, int | float] | None = None
    """A snapshot of all counters and gauges: now and then, and whenever the engine comes to rest."""
    logprobs: list[LogprobRecord] = []
    """Of each of `tokens`, empty where they were not asked for; no list where nobody asks."""


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True, frozen=True):
    """A sign of life from a thread of its own, also while a step runs."""

    phase: str
    """starting, idle or stepping."""
    since: float
    """Monotonic time at which that phase (or that very step) began."""
    steps: int
    spent: float = 0.0
    """Seconds that it had lasted when this was sent, but for those in which the process waited for a processor."""


class Answer(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    """To a `Call`."""

    number: int
    value: Any = None
    error: str | None = None


class ViewFrame(msgspec.Struct, tag="view", array_like=True, frozen=True):
    """For watchers: a `quire.engine.watch.view_frame.Frame` as JSON, to be handed on as it is."""

    body: bytes
    full: bool
    """It tells everything, so it can be understood without those before."""


class KVChanges(msgspec.Struct, tag="kv", array_like=True, frozen=True):
    """Prefixes that the device holds since the last such message, and those that it does not hold any more: their
    names, 16 bytes each, one after the other. Sent by engines that share a secret (`kv_secret_file`)."""

    stored: bytes
    evicted: bytes
    cleared: bool
    """What was held before is forgotten."""


FromEngine = Ready | Failed | Refused | StepOutputs | Heartbeat | Answer | ViewFrame | KVChanges

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_body = msgspec.msgpack.Decoder(RequestBody).decode


def add(handle: int, body: RequestBody) -> Add:
    return Add(handle, msgspec.Raw(encode(body)))
