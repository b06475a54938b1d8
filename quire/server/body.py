"""Reads and checks the body of a request."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quire.options import parse_bytes
from quire.server.api_error import ApiError, validation_error
from quire.server.generation import ClientGone
from quire.server_config import ServerConfig

_Body = TypeVar("_Body", bound=BaseModel)
MAX_ELEMENTS = 1 << 18
_SLICE_SECONDS = 0.005
_LARGE = 1 << 15
"""Bytes of a body from which on others have a turn between the steps of reading it."""
_TEXT = re.compile(rb'(?:[^"\\]{1,512}|\\.){0,1024}', re.DOTALL)
"""A piece of a JSON text, up to its end or a bounded length."""
_DRAINED = 8
"""Of a body that is too large, so many times the limit are read and dropped, so that the client sees our answer."""


async def read_body(scope: Any, receive: Any, kind: type[_Body], config: ServerConfig) -> _Body:
    """The body as what it should be; ApiError where it is not, is too large, or does not come."""
    data = await read_json(scope, receive, config)
    await _let_others(data)
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)  # the input may be large
    else:
        await _let_others(data)
        return body
    await _let_others(data)
    raise validation_error(found, _plain(data)) from None


async def read_json(scope: Any, receive: Any, config: ServerConfig) -> bytes:
    """The bytes of a body that says it is JSON and that can be read in a bounded time."""
    headers = dict(scope["headers"])
    media = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if media != b"application/json":
        # A web page anywhere may post other types to this machine without asking; JSON needs CORS.
        raise ApiError(415, "the content type must be application/json", code="unsupported_media_type")
    most = parse_bytes(config.max_body_size, "max_body_size")
    length = headers.get(b"content-length", b"0")
    declared = int(length) if length.isdigit() else 0
    if declared > most and (b"expect" in headers or declared > _DRAINED * most):
        raise _too_large(most)
    try:
        async with asyncio.timeout(config.read_timeout):
            data = await _read(receive, most)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {config.read_timeout:g} seconds",
                       code="read_timeout") from None
    await _check_elements(data)
    return data


async def _let_others(data: bytes) -> None:
    """Each step of reading a large body takes milliseconds; the event loop serves others between two of them."""
    if len(data) >= _LARGE:
        await asyncio.sleep(0)  # the loop looks for news now, and queues them behind this task
        await asyncio.sleep(0)  # they are served


def _plain(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


async def _check_elements(data: bytes) -> None:
    """Refuse what would take long to check: parsing time grows with the elements and blocks the event loop."""
    if len(data) < MAX_ELEMENTS // 16 or most_weight(data) <= MAX_ELEMENTS:
        return
    await _let_others(data)
    since = time.perf_counter()
    for found in weights(data):
        if found > MAX_ELEMENTS:
            raise ApiError(413, "the body has too many elements (messages, tokens, entries): send less in one request",
                           code="body_too_complex")
        if time.perf_counter() - since > _SLICE_SECONDS:
            await asyncio.sleep(0)
            since = time.perf_counter()


def most_weight(data: bytes) -> int:
    """What `weights` comes to at most: some of it may stand in texts, which are one element each."""
    return _elements(data, 0, len(data))


def weights(data: bytes) -> Iterator[int]:
    """How much of a JSON text has to be read element by element: the weight so far, after each piece."""
    found, place, in_text = 0, 0, False
    while place < len(data):
        if in_text:
            piece = _TEXT.match(data, place)
            end = place if piece is None else piece.end()
            in_text = end > place and data[end : end + 1] != b'"'
            place = end if in_text else end + 1
        else:
            quote = data.find(b'"', place)
            end = len(data) if quote < 0 else quote
            found += _elements(data, place, end)
            place, in_text = end + 1, True
        yield found


def _elements(data: bytes, start: int, end: int) -> int:
    """The weight of what stands outside of texts: an object takes as long to check as many numbers."""
    return (data.count(b",", start, end) + 16 * (data.count(b"[", start, end) + data.count(b":", start, end))
            + 32 * data.count(b"{", start, end))


async def _read(receive: Any, most: int) -> bytes:
    """All of it. Of one that is too large some more is read and dropped: a client that is still sending when the
    connection closes sees a reset, and not the answer that says why."""
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client has closed its connection")
        piece = message.get("body", b"")
        size += len(piece)
        if size <= most:
            pieces.append(piece)
        else:
            pieces.clear()
        if size > _DRAINED * most or (size > most and not message.get("more_body", False)):
            raise _too_large(most)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
