"""From what a caller gives to what the scheduler takes: template, tokenize, validate."""

from __future__ import annotations

import math
import operator
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Annotated, Any, cast

import numpy as np

from quire.errors import InvalidRequestError
from quire.kvcache.prefix import cache_key
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.scheduler.beam import BeamSearch
from quire.scheduler.request import Request
from quire.tokenizer.tokenizer import Tokenizer

Params = SamplingParams | BeamSearchParams
Prompt = str | Sequence[int] | Mapping[str, Any]
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens"}


class InputProcessor:
    """Makes requests. Invalid ones are refused here, before the engine sees them."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int],
                 seed: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._read_ids = _id_reader(vocab_size)
        # An id beyond the vocabulary can never be drawn, whatever a config says.
        self._eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._seeds = random.Random(seed)

    def request(self, request_id: str, prompt: Prompt, params: Params, *, priority: int = 0,
                cache_salt: str | None = None, tenant: str | None = None,
                arrival_time: float | None = None) -> tuple[Request, str | None]:
        """The request for a prompt, and the prompt's text where there is one."""
        text, tokens, salt = self._read(prompt)
        beams = self._beams(params) if isinstance(params, BeamSearchParams) else None
        sampling = _drawn_like(params) if isinstance(params, BeamSearchParams) else params
        self._check_params(sampling)
        salt = salt if cache_salt is None else _text(cache_salt, "cache_salt")
        if arrival_time is not None and (isinstance(arrival_time, bool) or not isinstance(arrival_time, int | float)
                                         or not math.isfinite(arrival_time)):
            raise InvalidRequestError(f"arrival_time must be a number of seconds, not {arrival_time!r:.80}",
                                      field="arrival_time")
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            params=sampling,
            seed=self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            eos_token_ids=self._eos_token_ids,
            bad_words=self._bad_words(sampling),
            priority=_integer(priority, "priority"),
            cache_key=b"" if salt is None else cache_key(["salt", salt]),
            tenant="" if tenant is None else _text(tenant, "tenant"),
            beams=beams,
        )
        return request, text

    def _beams(self, params: BeamSearchParams) -> BeamSearch:
        beams = BeamSearch(params, self._eos_token_ids)
        if beams.num_candidates > self._vocab_size:
            raise InvalidRequestError(
                f"beam_width {params.beam_width} looks at {beams.num_candidates} next tokens of each beam, and the "
                f"vocabulary has {self._vocab_size}: lower it", field="beam_width")
        return beams

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        salt, special = None, True
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - _PROMPT_KEYS
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise InvalidRequestError(
                    "a prompt given as a dict has either 'prompt' or 'prompt_token_ids', and optionally 'cache_salt' "
                    f"and 'add_special_tokens'; not {sorted(map(str, prompt))}", field="prompt")
            salt = prompt.get("cache_salt")
            salt = None if salt is None else _text(salt, "cache_salt")
            special = prompt.get("add_special_tokens", True)
            if not isinstance(special, bool):
                raise InvalidRequestError("add_special_tokens must be True or False", field="add_special_tokens")
            if "prompt_token_ids" in prompt:
                if isinstance(prompt["prompt_token_ids"], str):
                    raise InvalidRequestError("prompt_token_ids is a list of token ids: give text as prompt",
                                              field="prompt_token_ids")
                return None, self._checked_ids(prompt["prompt_token_ids"]), salt
            prompt = _text(prompt["prompt"], "prompt")
        if isinstance(prompt, str):
            return prompt, self._tokenize(prompt, special), salt
        return None, self._checked_ids(prompt), salt

    def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer (skip_tokenizer_init): give the prompt as token ids", field="prompt")
        if not text:
            raise InvalidRequestError("the prompt is empty: give at least one character or token", field="prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt is not valid Unicode: {error.reason}", field="prompt") from None
        tokens = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not tokens:
            raise InvalidRequestError("the prompt has no tokens", field="prompt")
        self._check_range(tokens)
        return tokens

    def _checked_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, (bytes, bytearray)) or not isinstance(ids, Sequence):
            raise InvalidRequestError(f"a prompt is a string or a list of token ids, not {type(ids).__name__}",
                                      field="prompt")
        if not ids:
            raise InvalidRequestError("the prompt is empty: give at least one character or token", field="prompt")
        if type(ids) is list and (read := self._read_ids(ids)) is not None:
            return read
        tokens = list(ids)
        if operator.countOf(map(type, tokens), int) != len(tokens):  # half the time of a set of the types
            for token in tokens:
                if isinstance(token, bool) or not isinstance(token, Integral):
                    raise InvalidRequestError(f"token ids are integers, not {type(token).__name__} {token!r:.80}",
                                              field="prompt")
            tokens = [int(token) for token in tokens]
        self._check_range(tokens)
        return tokens

    def _check_range(self, tokens: list[int]) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequestError(
                f"token id {low if low < 0 else high} is outside the vocabulary (0 to {self._vocab_size - 1})",
                field="prompt")

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}", field="sampling_params")
        params.validate_for_vocab(self._vocab_size)
        if self._tokenizer is None and params.structured_outputs is not None:
            raise InvalidRequestError("structured_outputs needs a tokenizer, and this engine has none "
                                      "(skip_tokenizer_init)", field="structured_outputs")
        if self._tokenizer is None and (params.stop or params.bad_words):
            raise InvalidRequestError("stop strings and bad_words need a tokenizer; use stop_token_ids",
                                      field="stop" if params.stop else "bad_words")

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is tokenized at the start of a text and inside one."""
        if not params.bad_words or self._tokenizer is None:
            return []
        found: list[list[int]] = []
        for word in params.bad_words:
            for form in (word, " " + word.lstrip()):
                tokens = self._tokenizer.encode(form, add_special_tokens=False)
                if tokens and tokens not in found and max(tokens) < self._vocab_size:
                    found.append(tokens)
        return found


def _id_reader(vocab_size: int) -> Callable[[list[Any]], list[int] | None]:
    """Copies a list whose items are all ids of the vocabulary; None: look at them one by one. A batch of long prompts
    waits for this, and a pass of min and one of max would take most of the time."""
    try:
        import msgspec
    except ImportError:  # the engine itself does without
        return partial(_read_by_array, vocab_size)
    wanted: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]

    def read(ids: list[Any]) -> list[int] | None:
        try:
            return cast(list[int], msgspec.convert(ids, wanted))
        except msgspec.ValidationError:
            return None

    return read


def _read_by_array(vocab_size: int, ids: list[Any]) -> list[int] | None:
    if operator.countOf(map(type, ids), int) != len(ids):
        return None
    try:
        words = array("I", ids)
    except OverflowError:  # negative, or too large for 32 bits
        return None
    return ids.copy() if np.frombuffer(words, np.uint32).max() < vocab_size else None


def _drawn_like(params: BeamSearchParams) -> SamplingParams:
    """What the rest of the engine needs to know of a request whose tokens are searched, not drawn."""
    return SamplingParams(max_tokens=params.max_tokens, temperature=params.temperature, seed=0,
                          ignore_eos=params.ignore_eos,
                          include_stop_str_in_output=params.include_stop_str_in_output)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string, not {type(value).__name__}", field=name)
    return value


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r:.80}", field=name)
    return int(value)
