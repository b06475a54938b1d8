"""What a caller may ask of sampling: every field is checked at once and refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, TypeVar

from quire.errors import InvalidRequestError
from quire.structured.spec import StructuredOutputs

MAX_LOGPROBS: Final = 20
MAX_SEQUENCES: Final = 64
MAX_STOPS: Final = 64
MAX_STOP_LENGTH: Final = 1024
MAX_BAD_WORDS: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_TOKEN_IDS: Final = 1 << 20
MAX_BEAM_WIDTH: Final = 64
GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy: a division by them would only overflow."""

NOTHING_TO_DRAW: Final = (
    "structured_outputs, allowed_token_ids, bad_words, min_tokens and logit_bias together leave no token that may be "
    "drawn; relax one of them")
"""Parameters that contradict each other, found by the engine: reported to the caller."""
_INT_MAX: Final = (1 << 31) - 1


def _refuse(field: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {message}", field=field)


def _integer(field: str, value: Any, low: int, high: int) -> int:
    # numbers.Integral: numpy's integers are as good as Python's.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _refuse(field, f"must be an integer, not {type(value).__name__} {value!r:.80}")
    number = int(value)
    if not low <= number <= high:
        raise _refuse(field, f"must be between {low} and {high}, not {number}")
    return number


def _number(field: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A finite float in [low, high], or in (low, high] with `above`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(field, f"must be a number, not {type(value).__name__} {value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        raise _refuse(field, f"must be a finite number no greater than {high}") from None
    if not math.isfinite(number):
        raise _refuse(field, f"must be a finite number, not {value!r}")
    if number < low or number > high or (above and number == low):
        bounds = f"above {low:g}" if above else f"at least {low:g}"
        bounds += "" if high == math.inf else f" and at most {high:g}"
        raise _refuse(field, f"must be {bounds}, not {value!r}")
    return number


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(field, f"must be True or False, not {type(value).__name__} {value!r:.80}")
    return value


def _items(field: str, value: Any, most: int) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | set | frozenset):
        raise _refuse(field, f"must be a list, not {type(value).__name__} {value!r:.80}")
    if len(value) > most:
        raise _refuse(field, f"has {len(value)} entries; at most {most} are allowed")
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)


def _strings(field: str, value: Any, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    words = _items(field, [value] if isinstance(value, str) else value, most)
    for word in words:
        if not isinstance(word, str):
            raise _refuse(field, f"must hold strings only, not {type(word).__name__} {word!r:.80}")
        if not word:
            raise _refuse(field, "may not hold an empty string: it would match everywhere")
        if len(word) > MAX_STOP_LENGTH:
            raise _refuse(
                field, f"holds a string of {len(word)} characters; at most {MAX_STOP_LENGTH} are allowed"
            )
    return tuple(dict.fromkeys(words))


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    items = _items(field, value, MAX_TOKEN_IDS)
    if {*map(type, items)} == {int}:  # there may be hundreds of thousands: one by one they hold others up
        distinct = tuple(dict.fromkeys(items))
        if min(distinct) >= 0 and max(distinct) <= _INT_MAX:
            return distinct
    return tuple(dict.fromkeys(_integer(field, item, 0, _INT_MAX) for item in items))


def _logit_bias(value: Any) -> dict[int, float]:
    field = "logit_bias"
    if not isinstance(value, Mapping):
        raise _refuse(field, f"must map token ids to numbers, not {type(value).__name__} {value!r:.80}")
    if len(value) > MAX_TOKEN_IDS:
        raise _refuse(field, f"has {len(value)} entries; at most {MAX_TOKEN_IDS} are allowed")
    return {
        _integer(field, token, 0, _INT_MAX): _number(field, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for token, bias in value.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, dict) else value


def _structured(value: Any) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise _refuse("structured_outputs", f"must be StructuredOutputs, not {type(value).__name__} {value!r:.80}")
    return StructuredOutputs.from_dict(value)


_Params = TypeVar("_Params", "SamplingParams", "BeamSearchParams")


def _from_dict(cls: type[_Params], data: Mapping[str, Any]) -> _Params:
    known = {f.name for f in dataclasses.fields(cls)}
    for name in data:
        if name not in known:
            raise InvalidRequestError(
                f"{name} is not a field of {cls.__name__}; known: {', '.join(sorted(known))}", field=str(name)
            )
    return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    Values are normalised: `stop`, `stop_token_ids` and `bad_words` become tuples, `top_k` off becomes 0.
    """

    n: int = 1
    best_of: int | None = None
    """Draw so many and return the `n` of the highest cumulative log-probability, best first."""
    temperature: float = 1.0
    """0 (or below 1e-5): greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Unsigned, 64 bits; None: the engine draws one for the request and reports it."""
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many most likely tokens to report at each position besides the drawn one; 0: the drawn one only."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    """The shape that the output must have. Log-probabilities are then those among the tokens it allows."""

    def __post_init__(self) -> None:
        values = {**self._numbers(), **self._collections()}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_contradictions()

    def _numbers(self) -> dict[str, Any]:
        def optional(field: str, low: int, high: int) -> int | None:
            value = getattr(self, field)
            return None if value is None else _integer(field, value, low, high)

        top_k = _integer("top_k", self.top_k, -1, _INT_MAX)
        return {
            "n": _integer("n", self.n, 1, MAX_SEQUENCES),
            "best_of": optional("best_of", 1, MAX_SEQUENCES),
            "temperature": _number("temperature", self.temperature, 0.0, math.inf),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, above=True),
            "top_k": max(top_k, 0),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "seed": optional("seed", 0, (1 << 64) - 1),
            "max_tokens": optional("max_tokens", 1, _INT_MAX),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, _INT_MAX),
            "logprobs": optional("logprobs", 0, MAX_LOGPROBS),
            "prompt_logprobs": optional("prompt_logprobs", 0, MAX_LOGPROBS),
        }

    def _collections(self) -> dict[str, Any]:
        bad_words = _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        allowed = self.allowed_token_ids
        if allowed is not None:
            allowed = _token_ids("allowed_token_ids", allowed)
            if not allowed:
                raise _refuse(
                    "allowed_token_ids", "is empty, so no token could ever be drawn; leave it out instead"
                )
        return {
            "stop": _strings("stop", self.stop, MAX_STOPS),
            "stop_token_ids": ()
            if self.stop_token_ids is None
            else _token_ids("stop_token_ids", self.stop_token_ids),
            "include_stop_str_in_output": _flag(
                "include_stop_str_in_output", self.include_stop_str_in_output
            ),
            "ignore_eos": _flag("ignore_eos", self.ignore_eos),
            "logit_bias": None if self.logit_bias is None else _logit_bias(self.logit_bias),
            "bad_words": bad_words,
            "allowed_token_ids": allowed,
            "skip_special_tokens": _flag("skip_special_tokens", self.skip_special_tokens),
            "detokenize": _flag("detokenize", self.detokenize),
            "structured_outputs": _structured(self.structured_outputs),
        }

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse(
                "min_tokens", f"({self.min_tokens}) may not be above max_tokens ({self.max_tokens})"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise _refuse("best_of", f"({self.best_of}) may not be below n ({self.n})")
        if self.stop and not self.detokenize:
            raise _refuse("stop", "needs text to look at: set detokenize=True, or use stop_token_ids")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def ranked(self) -> bool:
        """Sequences are returned by their cumulative log-probability, best first, and not by index."""
        return self.best_of is not None and self.best_of > 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` after normalisation, with the narrow type."""
        return tuple(self.stop or ())

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have."""
        named = {
            "stop_token_ids": self.stop_token_ids or (),
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for field, ids in named.items():
            highest = max(ids, default=0)
            if highest >= vocab_size:
                raise _refuse(
                    field, f"holds token id {highest}; the model's vocabulary ends at {vocab_size - 1}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` of it gives an equal object."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SamplingParams:
        return _from_dict(cls, data)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How beam search explores: the `beam_width` most likely continuations are kept at every step."""

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    """Scores are divided by length ** length_penalty."""
    early_stopping: bool | str = False
    """True: end as soon as beam_width sequences are complete. False: go on while a running one would beat them
    at its present length. "never": go on while one could beat them at any length up to max_tokens."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """0: log-probabilities as the model gives them; else they are of logits divided by it."""
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam_width", _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH))
        object.__setattr__(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, _INT_MAX))
        object.__setattr__(
            self, "length_penalty", _number("length_penalty", self.length_penalty, -10.0, 10.0)
        )
        object.__setattr__(self, "temperature", _number("temperature", self.temperature, 0.0, math.inf))
        for field in ("ignore_eos", "include_stop_str_in_output"):
            _flag(field, getattr(self, field))
        if self.early_stopping not in (True, False, "never") or (isinstance(self.early_stopping, int | float) \
                and not isinstance(self.early_stopping, bool)):
            raise _refuse("early_stopping", f"must be True, False or 'never', not {self.early_stopping!r:.80}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` of it gives an equal object."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BeamSearchParams:
        return _from_dict(cls, data)
