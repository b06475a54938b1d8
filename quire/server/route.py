"""One line of the server's table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from quire.server.api_error import ApiError
from quire.server.service import RequestRecord

Handler = Callable[[Any, RequestRecord, Any, Any, Any], Awaitable[None]]
"""Gets the service that the application was made for, the request's record, and what ASGI gives: scope, receive,
send."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path, what it takes and answers, and who does it."""

    method: str
    path: str
    summary: str
    handler: Handler
    takes: type[BaseModel] | None = None
    gives: type[BaseModel] | None = None
    media: str = "application/json"
    open: bool = False
    """No key is asked for."""
    works: bool = False
    """It gives the engine work, so it is refused while the server is closing."""
    streams: bool = False
    also: tuple[str, ...] = ()
    """Statuses that it may answer with beside those that follow from the rest."""
    error_body: Callable[[ApiError], dict[str, Any]] | None = None
    """Errors in the form of another API; None: OpenAI's."""
