"""From the fields of a body to the engine's SamplingParams or BeamSearchParams, within the server's limits."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.input import Params
from quire.errors import InvalidRequestError
from quire.options import parse_bytes
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.server.api_error import ApiError, refusal
from quire.server.openai_api.protocol import GenerationBody, ResponseFormatJsonObject, ResponseFormatJsonSchema
from quire.server_config import ServerConfig
from quire.structured.spec import StructuredOutputs

_JSON = json.JSONEncoder()
_SAME_NAME = ("frequency_penalty", "presence_penalty", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens",
              "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words", "allowed_token_ids",
              "skip_special_tokens")
_BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")
_NOT_WITH_BEAMS = ("frequency_penalty", "presence_penalty", "top_p", "top_k", "min_p", "repetition_penalty",
                   "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids", "skip_special_tokens",
                   "logit_bias", "stop", "best_of", "logprobs", "top_logprobs", "echo", "response_format", "tools",
                   "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the two kinds of request spell differently."""

    max_tokens: int | None
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    shape: StructuredOutputs | None = None
    """What the text must match."""
    skip_special_tokens: bool | None = None


def engine_params(body: GenerationBody, wishes: Wishes, config: ServerConfig) -> Params:
    """Raises ApiError or InvalidRequestError for what cannot be."""
    _check_limits(body, wishes, config)
    if body.use_beam_search:
        return _beams(body, wishes, config)
    for name in _BEAM_FIELDS:
        if getattr(body, name) is not None:
            raise refusal(name, "needs use_beam_search")
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    if body.top_p == 0:  # the smallest share that holds a token: the likeliest alone
        fields["top_p"], fields["top_k"] = 1.0, 1
    if body.temperature is not None:
        fields["temperature"] = body.temperature
    if body.logit_bias:
        fields["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    if wishes.skip_special_tokens is not None and body.skip_special_tokens is None:
        fields["skip_special_tokens"] = wishes.skip_special_tokens
    if wishes.shape is not None:
        fields["structured_outputs"] = wishes.shape
    return SamplingParams(
        n=body.n or 1, best_of=None if body.stream else wishes.best_of, max_tokens=wishes.max_tokens,
        logprobs=wishes.logprobs, prompt_logprobs=wishes.prompt_logprobs, stop=body.stop,
        seed=None if body.seed is None else body.seed % (1 << 64), **fields)


def _check_limits(body: GenerationBody, wishes: Wishes, config: ServerConfig) -> None:
    for name, value, most in (
        ("n", body.n, config.max_n),
        ("best_of", wishes.best_of, config.max_n),
        ("beam_width", body.beam_width, config.max_n),
        ("top_logprobs" if hasattr(body, "top_logprobs") else "logprobs", wishes.logprobs, config.max_logprobs),
    ):
        if value is not None and value > most:
            raise refusal(name, f"must be at most {most} on this server, not {value}")
    stops = body.stop if isinstance(body.stop, list) else []
    if len(stops) > config.max_stops:
        raise refusal("stop", f"holds {len(stops)} texts; this server takes at most {config.max_stops}")
    if body.stream_options is not None and not body.stream:
        raise refusal("stream_options", "needs stream")
    best_of = wishes.best_of
    if body.stream and best_of is not None and best_of > (body.n or 1):
        raise refusal("best_of", "above n cannot be streamed: which ones are best is known at the end")


def _beams(body: GenerationBody, wishes: Wishes, config: ServerConfig) -> BeamSearchParams:
    for name in _NOT_WITH_BEAMS:
        if getattr(body, name, None) not in (None, False):
            raise refusal(name, "cannot be combined with use_beam_search")
    width = body.beam_width or body.n or 1
    if width < (body.n or 1):
        raise refusal("beam_width", f"({width}) may not be below n ({body.n})")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=wishes.max_tokens or 1,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=False if body.early_stopping is None else body.early_stopping,
        ignore_eos=bool(body.ignore_eos),
        temperature=body.temperature or 0.0,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def shape_of(body: GenerationBody, config: ServerConfig) -> tuple[str, StructuredOutputs] | None:
    """What the text must match, and the field that asks for it. At most one may."""
    found: list[tuple[str, dict[str, Any]]] = []
    wanted = getattr(body, "response_format", None)
    if isinstance(wanted, ResponseFormatJsonObject):
        found.append(("response_format", {"json_object": True}))
    elif isinstance(wanted, ResponseFormatJsonSchema):
        schema = wanted.json_schema.schema_
        found.append(("response_format", {"json_object": True} if schema is None else {"json": schema}))
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        if len(given) != 1 or given.get("json_object") is False:
            raise refusal("structured_outputs",
                          "must hold exactly one of json, json_object, regex, choice, grammar and structural_tag")
        found.append(("structured_outputs", given))
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found.append((f"guided_{name}", {name: value}))
    if not found:
        return None
    if len(found) > 1:
        raise refusal(found[1][0], f"cannot be combined with {found[0][0]}: the text can match one thing only")
    check_size(*found[0], config)
    return found[0][0], structured(*found[0])


def check_size(field: str, constraint: Any, config: ServerConfig) -> None:
    most = parse_bytes(config.max_schema_size, "max_schema_size")
    if _longer_than(most, constraint):
        raise refusal(field, f"is longer than the {most} bytes that this server takes", code="schema_too_large")


def _longer_than(most: int, constraint: Any) -> bool:
    """Whether its JSON has more bytes. Written quickly, or up to the bound: others wait meanwhile."""
    try:
        return len(msgspec.json.encode(constraint)) > most
    except (OverflowError, TypeError, ValueError):  # numbers or texts that only Python's encoder can write
        size = 0
        return any((size := size + len(piece)) > most for piece in _JSON.iterencode(constraint))


def structured(field: str, constraint: dict[str, Any]) -> StructuredOutputs:
    """Keywords of StructuredOutputs, checked; complaints are about the client's own field.

    Raises ApiError.
    """
    try:
        return StructuredOutputs(**constraint)
    except InvalidRequestError as error:
        raise ApiError(400, in_words_of(field, str(error)), param=field) from error


def in_words_of(field: str | None, message: str) -> str:
    """A complaint about `structured_outputs.…` that names what the client has written instead."""
    if field in (None, "structured_outputs"):
        return message
    return re.sub(r"^structured_outputs(\.\w+)?", lambda _: str(field), message)
