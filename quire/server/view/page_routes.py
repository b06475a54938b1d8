"""The page's own files, which hold no data and need no key, and the routes that feed its view of the engine."""

from __future__ import annotations

from collections.abc import Collection
from importlib import resources
from typing import Any

from quire.server.answer import send_json
from quire.server.route import Handler, Route
from quire.server.service import RequestRecord, Service
from quire.server.view.engine_view import EngineView, PlayBody

_TYPES = {"html": b"text/html; charset=utf-8", "css": b"text/css; charset=utf-8",
          "js": b"text/javascript; charset=utf-8", "svg": b"image/svg+xml"}
_HEADERS = [
    # Nothing but what this server sends runs or is shown, and nothing is sent anywhere else.
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                                 b"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-cache")]


def page_routes(service: Service) -> list[Route]:
    """Left out where the server runs without its page."""
    view = EngineView(service)
    return [
        *file_routes("quire.server"),
        Route("GET", "/v1/engine/events", "The engine at work, as it happens", view.events, streams=True),
        Route("GET", "/v1/engine/snapshot", "The engine as it is now", view.snapshot),
        Route("GET", "/v1/engine/scenarios", "Scenarios that can be played", view.scenarios),
        Route("POST", "/v1/engine/scenarios", "Play one on small engines of its own", view.play, PlayBody,
              streams=True),
    ]


def file_routes(package: str, names: Collection[str] | None = None) -> list[Route]:
    """The files of a package's page, all or those named; its index.html is the page at /."""
    found = []
    for file in sorted(resources.files(package).joinpath("page").iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None and (names is None or file.name in names):
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found.append(Route("GET", path, "", _sends(file.read_bytes(), kind), open=True))
    return found


def _sends(body: bytes, kind: bytes) -> Handler:
    async def handler(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
        await send_json(send, 200, body, [(b"content-type", kind), *_HEADERS])

    return handler
