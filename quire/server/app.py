"""The ASGI application: lets requests in, finds their route, and answers for whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from quire.server.access.auth import ApiKeys
from quire.server.access.hosts import AllowedHosts
from quire.server.answer import send_error
from quire.server.api_error import ApiError, api_error
from quire.server.cluster.disaggregation import PrefillHeader
from quire.server.generation import ClientGone
from quire.server.route import Route
from quire.server.routes import ROUTES
from quire.server.service import RequestRecord, Service
from quire.server.telemetry.log import LOGGER, event
from quire.server.telemetry.tracing import Tracing
from quire.server.view.page_routes import page_routes
from quire.server_config import ServerConfig

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_CLIENT_CLOSED = 499
"""nginx' status for a request whose client has gone; it is seen in the log only."""


def build_app(engine: Any, config: ServerConfig, *, keys: ApiKeys | None = None,
              tracing: Tracing | None = None) -> App:
    """The application around an engine; with `allowed_origins`, wrap it in `with_cors`."""
    service = Service(engine, config, ApiKeys.of(config) if keys is None else keys, tracing)
    return App(service, (*ROUTES, *(page_routes(service) if config.page else ())))


def with_cors(app: App, origins: str | None) -> Any:
    """The application, for pages of the given origins too. By default no page of another origin may read answers."""
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(app, allow_origins=[origin.strip() for origin in origins.split(",")],
                          allow_methods=["GET", "POST", "DELETE"],
                          allow_headers=["authorization", "x-api-key", "content-type"],
                          expose_headers=["x-request-id", "retry-after"])


class App:
    """The routes of a service: the server's, or the router's (`quire.router`)."""

    def __init__(self, service: Any, routes: Iterable[Route]) -> None:
        self.service = service
        self._prefill = PrefillHeader(service.engine_config)
        self._hosts = AllowedHosts(service.config, has_keys=len(service.keys) > 0)
        self._exact: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._exact.setdefault(route.path, {})[route.method] = route
        self._folders = {path[:path.index("{")]: methods for path, methods in self._exact.items() if "{" in path}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        record = _record(headers.get(b"x-request-id"), scope["method"], scope["path"])
        span = self.service.tracing.start({"traceparent": headers.get(b"traceparent", b"").decode("latin-1")})
        route: Route | None = None
        started = False

        async def send_noted(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            self._check_host(headers.get(b"host"))
            methods = self._methods(record.path)
            route = methods.get("GET" if record.method == "HEAD" else record.method)
            if route is None or not route.open:
                self._check_key(record, scope["headers"])
            route = _found(route, methods, record)
            if route.works and self.service.draining:
                raise ApiError(503, "the server is closing and takes no new requests", code="closing",
                               retry_after=5.0)
            if route.works:
                record.prefill = self._prefill.named(scope["headers"])
            await route.handler(self.service, record, scope, receive, send_noted)
        except ClientGone:
            record.status = _CLIENT_CLOSED
        except Exception as error:
            if not await self._failed(error, record, started, send_noted):
                raise
        finally:
            self._close(record, "other" if route is None else route.path, span)

    def _methods(self, path: str) -> dict[str, Route]:
        """The routes of a path, by method; none where there is no such path."""
        if path in self._exact:
            return self._exact[path]
        # The last part of a path may be a name: of a model, of a response.
        folder = next((each for each in self._folders if path.startswith(each) and len(path) > len(each)), None)
        return {} if folder is None else self._folders[folder]

    def _check_host(self, host: bytes | None) -> None:
        if not self._hosts.allows(host):
            raise ApiError(403, "this server does not answer to the name in the Host header: use a loopback name such "
                                "as localhost, or start it with --allowed-hosts", code="host_not_allowed")

    def _check_key(self, record: RequestRecord, headers: list[tuple[bytes, bytes]]) -> None:
        """Checked before the path: without a key no client learns which paths exist."""
        keys = self.service.keys
        given = [value for name, value in headers if name == b"authorization"]
        others = [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
        if len(given) > 1 or len(others) > 1:
            raise ApiError(400, "there are several headers with a key: send one", code="several_authorizations")
        if len(keys):
            record.tenant = keys.tenant(next(iter(given or others), None))
            if record.tenant is None:
                raise ApiError(401, "a valid API key is needed: send it as `Authorization: Bearer KEY` or as "
                                    "`x-api-key: KEY`", code="invalid_api_key")

    def _error_body(self, path: str) -> Callable[[ApiError], dict[str, Any]] | None:
        """The form of errors at a path: its own, or that of the path above it, so that a wrong path or method is told
        in the words of the API that it belongs to."""
        parts = path.split("/", 5)[:5]
        for end in range(len(parts), 1, -1):
            for route in self._methods("/".join(parts[:end])).values():
                return route.error_body
        return None

    async def _failed(self, error: Exception, record: RequestRecord, started: bool, send: Any) -> bool:
        """Answer with the error; False where the answer has begun and can only be cut off."""
        found = api_error(error)
        record.facts["error"] = str(found)
        if found.code == "internal_error":
            LOGGER.error("request_failed", exc_info=error, extra={"fields": {"request_id": record.request_id}})
        if started:
            return False
        form = self._error_body(record.path)
        await send_error(send, found, None if form is None else form(found))
        return True

    def _close(self, record: RequestRecord, path: str, span: Any) -> None:
        service, seconds = self.service, time.perf_counter() - record.started
        service.metrics.count_http(path, record.status)
        facts = record.facts
        if LOGGER.isEnabledFor(logging.INFO):
            # Probes come every few seconds for ever: they are worth a line only when they fail.
            quiet = record.status == 200 and path in ("/health", "/metrics")
            level = logging.DEBUG if quiet else logging.INFO if record.status < 500 else logging.WARNING
            event(level, "request", request_id=record.request_id,
                  method=record.method, path=record.path[:200], status=record.status,
                  milliseconds=round(seconds * 1e3, 3), tenant=record.tenant, **facts)
        service.tracing.end(span, f"{record.method} {path}", record.status, {
            "quire.request_id": record.request_id, "quire.tenant": record.tenant, "url.path": record.path,
            "gen_ai.request.model": service.model_name, "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.get("completion_tokens")})

    async def drain(self, seconds: float) -> None:
        """Take no new work and wait for what runs, at most so long; what is left then is ended."""
        service = self.service
        service.draining = True
        event(logging.INFO, "draining", requests=len(service.active), seconds=seconds)
        deadline = time.monotonic() + seconds
        while service.active and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        left = list(service.active)
        service.ending.update(left)
        for task in left:
            task.cancel()
        if left:
            event(logging.WARNING, "drain_deadline_passed", requests_ended=len(left))
            await asyncio.wait(left, timeout=5.0)


def _found(route: Route | None, methods: dict[str, Route], record: RequestRecord) -> Route:
    if route is not None:
        return route
    if not methods:
        raise ApiError(404, f"there is no {record.path:.200} on this server; GET /docs lists what there is",
                       code="unknown_path")
    raise ApiError(405, f"{record.path} takes {', '.join(methods)}, not {record.method:.20}",
                   code="method_not_allowed", allow=", ".join(methods))


def _record(given: bytes | None, method: str, path: str) -> RequestRecord:
    """The request's id is the client's own where that is a plain word: its log and ours can be read together."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return RequestRecord(given.decode(), method, path, suffix=f"-{secrets.token_hex(4)}")
    return RequestRecord(secrets.token_hex(16), method, path)


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
