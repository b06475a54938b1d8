"""What two engines say to each other over their side channel: plain data, all of it checked on arrival.

The decode side asks (`Prefill`), renews (`ping`) and calls off (`Abort`); the prefill side answers with what became of
it. A message that is not as described here raises `PeerError`: a prompt is refused then, and the link that brought any
other is closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequestError, PeerError
from quire.sampling.params import MAX_BAD_WORDS, SamplingParams
from quire.sampling.token_logprobs import LogprobRecord, TokenLogprobs, unpack_all
from quire.scheduler.remote import FirstToken

PROTOCOL_VERSION = 1
MOST_TOKENS = 1 << 24
_MOST_GROUPS = 64
_MOST_REASON = 500
_MOST_PRIORITY = 1 << 31
_MOST_WORDS = 2 * MAX_BAD_WORDS
"""Each as at the start of a text, and as inside one."""
_MOST_OF_A_WORD = 1 << 16

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this prompt and write its KV to where `ticket` says."""

    transfer: int
    tokens: list[int]
    """All that the other side is to compute."""
    first_token: bool
    """Draw the token after them, and tell it."""
    params: SamplingParams
    seed: int
    eos: list[int]
    bad_words: list[list[int]]
    cache_key: bytes
    priority: int
    tenant: str
    start: int
    """KV of tokens from here on is wanted."""
    starts: list[int]
    """The same by cache group: a window group wants its last window only."""
    end: int
    ticket: Data
    """The receiver's: where the KV goes."""

    def to_data(self) -> Data:
        data: Data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # An engine takes any integer; one message that the other side refuses would close the link of all.
        data["priority"] = max(-_MOST_PRIORITY, min(self.priority, _MOST_PRIORITY))
        params = self.params.to_dict()
        if params["logit_bias"] is not None:  # JSON has no integer keys
            params["logit_bias"] = sorted(params["logit_bias"].items())
        return {**data, "kind": "prefill", "params": params, "cache_key": self.cache_key.hex()}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Prefill:
        tokens = _integers(data, "tokens", MOST_TOKENS)
        end = _integer(data, "end", 0, len(tokens))
        return cls(
            _transfer(data), tokens, _flag(data, "first_token"), _params(data.get("params")),
            _integer(data, "seed", 0, (1 << 64) - 1), _integers(data, "eos", 1024), _words(data.get("bad_words")),
            _bytes(data, "cache_key"), _integer(data, "priority", -_MOST_PRIORITY, _MOST_PRIORITY),
            _text(data, "tenant", 256), _integer(data, "start", 0, end),
            _integers(data, "starts", _MOST_GROUPS), end, _mapping(data, "ticket"))


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel this transfer."""

    transfer: int

    def to_data(self) -> Data:
        return {"kind": "abort", "transfer": self.transfer}


@dataclass(frozen=True, slots=True)
class Working:
    """The prefill side has the request: it waits, computes or sends."""

    transfer: int

    def to_data(self) -> Data:
        return {"kind": "working", "transfer": self.transfer}


@dataclass(frozen=True, slots=True)
class First:
    """The first token, drawn by the prefill side."""

    transfer: int
    first: FirstToken

    def to_data(self) -> Data:
        return {"kind": "first", "transfer": self.transfer, "token": self.first.token,
                "logprobs": _plain(self.first.logprobs), "prompt_logprobs": _plain(self.first.prompt_logprobs)}


@dataclass(frozen=True, slots=True)
class Sent:
    """All KV is written: the prefill side holds no blocks for it any more."""

    transfer: int

    def to_data(self) -> Data:
        return {"kind": "sent", "transfer": self.transfer}


@dataclass(frozen=True, slots=True)
class Failed:
    """The prefill side does not do it, or not all of it; it writes no more."""

    transfer: int
    reason: str

    def to_data(self) -> Data:
        return {"kind": "failed", "transfer": self.transfer, "reason": self.reason[:_MOST_REASON]}


Message = Prefill | Abort | Working | First | Sent | Failed


def refused_alone(data: object) -> int | None:
    """The transfer of a prompt that is not as it must be, if it names one: then that one is refused, and the link stays
    for the others. What a client gave is in it, and no client may cost others their link."""
    if isinstance(data, Mapping) and data.get("kind") == "prefill":
        with contextlib.suppress(PeerError):
            return _transfer(data)
    return None


def parse(data: object) -> Message | None:
    """A message of the other engine; None for a sign of life. Raises PeerError for anything else."""
    if not isinstance(data, Mapping):
        raise PeerError("a message is not an object")
    kind = data.get("kind")
    if kind == "ping":
        return None
    if kind == "prefill":
        return Prefill.of(data)
    if kind == "abort":
        return Abort(_transfer(data))
    if kind == "working":
        return Working(_transfer(data))
    if kind == "sent":
        return Sent(_transfer(data))
    if kind == "failed":
        return Failed(_transfer(data), _text(data, "reason", _MOST_REASON))
    if kind == "first":
        first = FirstToken(_integer(data, "token", 0, 1 << 31), _logprobs(data.get("logprobs")),
                           _logprobs(data.get("prompt_logprobs")))
        return First(_transfer(data), first)
    raise PeerError(f"there is no message {kind!r:.40}")


# ---- log-probabilities


def _plain(logprobs: list[LogprobRecord] | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [[each.token_id, each.logprob, each.rank, each.top_ids, each.top_logprobs] for each in unpack_all(logprobs)]


def _logprobs(data: object) -> list[LogprobRecord] | None:
    if data is None:
        return None
    if not isinstance(data, list) or len(data) > MOST_TOKENS:
        raise PeerError("logprobs must be a list")
    return [_one_logprob(each) for each in data]


def _one_logprob(data: object) -> LogprobRecord:
    try:
        return _described(data).pack()
    except (OverflowError, struct.error):
        raise PeerError(f"{data!r:.80} has numbers that no log-probability has") from None


def _described(data: object) -> TokenLogprobs:
    match data:
        case [int(token), int() | float() as logprob, int(rank), [*ids], [*tops]] if not math.isnan(logprob):
            top_ids = [each for each in ids if type(each) is int]
            top_logprobs = [float(each) for each in tops if isinstance(each, int | float)]
            if len(top_ids) == len(top_logprobs) == len(ids) == len(tops) <= 1024:
                return TokenLogprobs(token, float(logprob), rank, top_ids, top_logprobs)
    raise PeerError(f"{data!r:.80} describes no log-probability")


# ---- fields


def _transfer(data: Mapping[str, Any]) -> int:
    return _integer(data, "transfer", 0, (1 << 63) - 1)


def _integer(data: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = data.get(name)
    if type(value) is not int or not low <= value <= high:
        raise PeerError(f"{name} must be an integer from {low} to {high}, not {value!r:.40}")
    return value


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if not isinstance(value, bool):
        raise PeerError(f"{name} must be true or false, not {value!r:.40}")
    return value


def _text(data: Mapping[str, Any], name: str, most: int) -> str:
    value = data.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise PeerError(f"{name} must be a text of at most {most} characters")
    return value


def _mapping(data: Mapping[str, Any], name: str) -> Data:
    value = data.get(name)
    if not isinstance(value, dict):
        raise PeerError(f"{name} must be an object")
    return value


def _bytes(data: Mapping[str, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(_text(data, name, 1024))
    except ValueError as error:
        raise PeerError(f"{name} must be hexadecimal") from error


def _integers(data: Mapping[str, Any], name: str, most: int) -> list[int]:
    return _integer_list(data.get(name), name, most)


def _integer_list(value: object, name: str, most: int) -> list[int]:
    if not isinstance(value, list) or len(value) > most or set(map(type, value)) - {int}:
        raise PeerError(f"{name} must be a list of at most {most} integers")
    if value and not 0 <= min(value) <= max(value) < 1 << 31:
        raise PeerError(f"{name} holds a number outside 0 to 2**31 - 1")
    return value


def _words(value: object) -> list[list[int]]:
    if not isinstance(value, list) or len(value) > _MOST_WORDS:
        raise PeerError(f"bad_words must be a list of at most {_MOST_WORDS}")
    return [_integer_list(word, "bad_words", _MOST_OF_A_WORD) for word in value]


def _params(value: object) -> SamplingParams:
    if not isinstance(value, dict):
        raise PeerError("params must be an object")
    bias = value.get("logit_bias")
    try:
        return SamplingParams.from_dict({**value, "logit_bias": None if bias is None else dict(bias)})
    except (InvalidRequestError, TypeError, ValueError) as error:
        raise PeerError(f"params: {error}") from error
