"""What the router must know of a request to choose a server: its model, its stream, the length of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

_BYTES_PER_TOKEN = 4
"""Of a body whose tokens were not counted."""


class _Fields(msgspec.Struct):
    """The fields of any body that asks for an output; whatever else there is, servers judge."""

    model: object = None
    stream: object = None
    previous_response_id: object = None


class _Error(msgspec.Struct):
    message: object = None
    code: object = None


class _Failed(msgspec.Struct):
    """A body of OpenAI's form that says what went wrong."""

    error: _Error


_decode = msgspec.json.Decoder(_Fields).decode
_decode_failed = msgspec.json.Decoder(_Failed).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(slots=True)
class Asked:
    """A request as a policy sees it."""

    num_tokens: int
    model: str | None = None
    stream: bool = False
    after: str | None = None
    """The response that it goes on from, which only the server that stored it knows."""
    held: dict[int, int] = field(default_factory=dict)
    """By number of a server: tokens at the start of the prompt whose KV it has."""


def asked_of(body: bytes) -> Asked:
    """From a body that may be anything: what cannot be read is passed on to be refused by a server."""
    tokens = max(1, len(body) // _BYTES_PER_TOKEN)
    try:
        found = _decode(body)
    except _UNREADABLE:
        return Asked(tokens)
    return Asked(tokens, found.model if isinstance(found.model, str) else None, found.stream is True,
                 found.previous_response_id if isinstance(found.previous_response_id, str) else None)


def error_of(body: bytes) -> tuple[str | None, str | None]:
    """Code and message of an error that a server sent, as far as it has some."""
    try:
        error = _decode_failed(body).error
    except _UNREADABLE:
        return None, None
    return (error.code if isinstance(error.code, str) else None,
            error.message[:200] if isinstance(error.message, str) else None)


def error_code(body: bytes) -> str | None:
    return error_of(body)[0]
