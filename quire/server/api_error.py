"""Whatever goes wrong with a request, as an HTTP status and a body in OpenAI's error shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.errors import EngineError, InvalidRequestError, QuireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_core import ErrorDetails

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error",
}
_CODES = {"QueueFullError": "queue_full", "EngineDeadError": "engine_dead", "RequestTimeoutError": "request_timeout",
          "QuarantinedError": "request_quarantined"}


@dataclass(frozen=True, slots=True)
class ContextExceeded:
    """The numbers of a request that is longer than the model's context."""

    prompt: str
    """Its tokens, or at least how many."""
    prompt_alone: bool
    """There would be no room for a single token of output."""
    output: int
    limit: int


class ApiError(QuireError):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after: float | None = None, allow: str | None = None,
                 context: ContextExceeded | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow
        self.context = context

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if self.allow is not None:
            found.append((b"allow", self.allow.encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def refusal(param: str, message: str, code: str | None = None) -> ApiError:
    """400 for one field; the message starts with its name."""
    return ApiError(400, message if message.startswith(param) else f"{param} {message}", param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """The answer for an exception from anywhere below. Details of an unexpected one go to the log only."""
    if isinstance(error, ApiError):
        return error
    name = type(error).__name__
    if name == "QueueFullError":
        return ApiError(429, str(error), code="queue_full", retry_after=getattr(error, "retry_after", None) or 1.0)
    if name == "RequestTimeoutError":
        return ApiError(504, str(error), code="request_timeout")
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.field, code=None)
    if name == "QuarantinedError":
        return ApiError(503, str(error), code=_CODES[name], retry_after=getattr(error, "retry_after", None))
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code=_CODES.get(name, "engine_error"))
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def validation_error(found: Sequence[ErrorDetails], data: Any) -> ApiError:
    """What pydantic found in a body, told as one sentence about one field."""
    if found[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {found[0]['ctx'].get('error', '')}", code="invalid_json")
    # Of a union every member complains; the one that got furthest into the data is the one that was meant.
    placed = [(_path(each["loc"], data, each["type"]), each) for each in found]
    path, first = max(placed, key=lambda item: len(item[0]))
    others = [each for where, each in placed if where == path]
    param = _dotted(path)
    return ApiError(400, _sentence(param, first, others), param=param or None, code=_code(first["type"]))


def _code(kind: str) -> str:
    known = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter",
             "none_required": "unsupported_parameter", "union_tag_invalid": "unsupported_value"}
    return known.get(kind, "invalid_value")


def _sentence(param: str, first: Any, others: Sequence[Any]) -> str:
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"unknown field {param}: this server does not know it"
    if kind == "none_required":
        return f"{param} is not supported by this server: leave it out"
    if kind == "missing":
        return f"{param} is missing"
    if kind == "union_tag_invalid":
        context = first.get("ctx", {})
        tag = context.get("tag", "")
        return (f"{param} is of a kind that this server does not support: {tag!r:.80}; it knows "
                f"{context.get('expected_tags', '')}")
    if kind == "value_error":
        return f"{param} {first['ctx']['error']}" if param else str(first["ctx"]["error"])
    wishes = list(dict.fromkeys(each["msg"][:1].lower() + each["msg"][1:] for each in others))[:4]
    return f"{param or 'the body'}: {'; or '.join(wishes)}"


def _path(loc: Sequence[str | int], data: Any, kind: str) -> list[str | int]:
    """The place in the client's data, without the names of union members that pydantic mixes in."""
    path: list[str | int] = []
    for place, step in enumerate(loc):
        last = place == len(loc) - 1
        if isinstance(data, dict) and isinstance(step, str) and (step in data or (last and kind == "missing")):
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int) and step < len(data):
            data = data[step]
        else:
            continue
        path.append(step)
    return path


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step:.80}" if text else f"{step:.80}"
    return text
