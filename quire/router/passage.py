"""The way of one request: choose a server, send it there, pass the answer on; another server where the first fails.

Until the client has been sent something nothing is lost when a server fails: the request is tried elsewhere. After that
the stream ends with an event that says what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from quire.router.asked import Asked, error_code, error_of
from quire.router.load import Ticket
from quire.router.prefill import Prefill
from quire.router.replica import Replica, Role
from quire.router.service import RouterService
from quire.router.upstream import Answer, UpstreamError
from quire.server.answer import named_sse, sse
from quire.server.api_error import ApiError
from quire.server.messages_api.answer import error_body
from quire.server.service import RequestRecord
from quire.server.telemetry.log import LOGGER

_PASSED_UP = frozenset({b"content-type", b"accept", b"authorization", b"x-api-key", b"traceparent", b"tracestate",
                        b"anthropic-version", b"anthropic-beta", b"openai-organization", b"openai-project",
                        b"user-agent"})
"""Headers of the client's that servers see. Quire's own are not among them: a client cannot speak as the router."""
_PASSED_DOWN = frozenset({b"content-type", b"cache-control", b"x-accel-buffering", b"retry-after", b"allow",
                          b"www-authenticate", b"content-security-policy"})
_TRY_ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""A full queue, an engine that died, a server that closes: another may be well. No other answer is doubted."""
_FINAL = frozenset({"request_quarantined", "request_timeout"})
"""Errors that are the request's own, though their status says otherwise."""
_PREFILL_REFUSED = "the header X-Quire-Prefill "
"""How a decode server begins to say that it does not ask whom the router names; on every API."""
_IN_QUERY = "!$%&'()*+,;=:@/?[]"
_MOST_WHOLE = 256 << 20
"""Bytes of an answer that is not streamed."""
_MOST_EVENT = 8 << 20
"""Bytes of an event that is not passed on before its end."""


class Passage:
    def __init__(self, service: RouterService, record: RequestRecord, scope: Any, send: Any, body: bytes,
                 asked: Asked, on_start: Callable[[], None] = lambda: None) -> None:
        self._service, self._record, self._send = service, record, send
        self._method, self._body, self._asked = scope["method"], body, asked
        query = scope.get("query_string", b"")
        # The path comes decoded: as it is, a line end in it would be one of the request to the server.
        self._path = quote(scope["path"], safe="/") + (f"?{quote(query, safe=_IN_QUERY)}" if query else "")
        self._headers = [*passed_up(scope), (b"x-request-id", record.request_id.encode())]
        self._on_start = on_start
        self._content = content_digest(record, body)
        self._tried: list[Replica] = []
        self._reached = 0
        """Servers that may have begun with it."""
        self._started = False
        """The client has been sent something."""
        self._refusal: tuple[Answer, bytes] | None = None
        """What the last server said that refused it."""

    async def run(self, seconds: float, only: Replica | None = None) -> None:
        """In so many seconds. `only`: the one server that can answer it."""
        self._service.quarantine.check(self._content)
        try:
            async with asyncio.timeout(seconds):
                await self._run(only)
        except TimeoutError:
            late = ApiError(504, f"the request was not done within {seconds:g} seconds", code="request_timeout")
            if not self._started:
                raise late from None
            await self._break_off(late)

    async def _run(self, only: Replica | None) -> None:
        while True:
            try:
                replica, held = self._next(only)
            except ApiError:
                if self._refusal is None:
                    raise
                await self._send_whole(*self._refusal)
                return
            self._tried.append(replica)
            ticket = replica.load.send(max(1, self._asked.num_tokens - held))
            try:
                if await self._try(replica, ticket):
                    return
            finally:
                ticket.ended()
            self._service.metrics.retries += 1

    def _next(self, only: Replica | None) -> tuple[Replica, int]:
        if self._reached > self._service.router.max_retries:
            raise ApiError(503, f"{self._reached} servers failed on this request: it is not tried again",
                           code="too_many_failures", retry_after=5.0)
        if only is not None:
            if self._tried or not only.available:
                raise ApiError(503, "the server that this request needs does not answer", code="no_server",
                               retry_after=1.0)
            return only, 0
        asked, metrics = self._asked, self._service.metrics
        found, held = self._service.fleet.choose((Role.BOTH, Role.DECODE), asked, self._tried)
        metrics.prompt_tokens += asked.num_tokens
        metrics.held_tokens += held
        return found, held

    async def _try(self, replica: Replica, ticket: Ticket) -> bool:
        """Whether the client has its answer; if not, another server is to be asked."""
        self._record.facts.update(server=replica.url, tries=len(self._tried))
        prefill = self._service.prefill.choose(self._asked) if replica.takes_prefill else Prefill([], None)
        try:
            headers = [*self._headers, *prefill.headers]
            try:
                answer = await replica.upstream.request(self._method, self._path, headers, self._body)
            finally:
                if prefill.ticket is not None:  # with the first token its part is done
                    prefill.ticket.ended()
            with contextlib.closing(answer):
                if prefill.headers and answer.status == 400:
                    return await self._pass_refusal(answer, replica)
                return await self._pass_on(answer, replica, ticket)
        except UpstreamError as error:
            self._suspect(replica, error.reached)
            replica.failed(str(error))
            replica.outcomes["broken" if self._started else "retried"] += 1
            LOGGER.warning("server_failed", extra={"fields": {
                "url": replica.url, "why": str(error), "request_id": self._record.request_id,
                "started": self._started}})
            if not self._started:
                return False
            await self._break_off(ApiError(503, f"the server that was answering has gone: {error}", code="server_lost",
                                           retry_after=1.0))
            return True

    def _suspect(self, replica: Replica, reached: bool) -> None:
        """A server failed that may have begun with this request, whose fault it may be. Many of the same content that
        were there together saw one failure."""
        if reached:
            self._reached += 1
            if replica.accuse(self._content):
                self._service.quarantine.died_with([self._content])

    def _innocent(self, replica: Replica) -> None:
        replica.breaker.succeeded()
        self._service.quarantine.served(self._content)

    async def _pass_on(self, answer: Answer, replica: Replica, ticket: Ticket) -> bool:
        streamed = answer.header(b"content-type").startswith(b"text/event-stream")
        if streamed and answer.status == 200:
            await self._stream(answer, replica, ticket)
            self._innocent(replica)
            replica.outcomes["ok"] += 1
            return True
        body = await answer.whole(_MOST_WHOLE)
        code = error_code(body) if answer.status in _TRY_ELSEWHERE else None
        if answer.status in _TRY_ELSEWHERE and code not in _FINAL:
            replica.refused(code, answer.status)
            self._suspect(replica, answer.status != 429 and code != "closing")
            self._refusal = (answer, body)
            return False
        self._innocent(replica)
        replica.outcomes["ok"] += 1
        self._service.noted(self._record.path, replica, body)
        await self._send_whole(answer, body)
        return True

    async def _pass_refusal(self, answer: Answer, replica: Replica) -> bool:
        """What a decode server minds may be the router's own header, of which the client knows nothing: then the same
        server is asked once more without it."""
        body = await answer.whole(_MOST_WHOLE)
        why = error_of(body)[1] or ""
        if not why.startswith(_PREFILL_REFUSED):
            self._innocent(replica)
            replica.outcomes["ok"] += 1
            await self._send_whole(answer, body)
            return True
        replica.refused_prefill()
        self._tried.remove(replica)
        LOGGER.warning("prefill_refused", extra={"fields": {
            "url": replica.url, "why": why,
            "advice": "router and servers need the same secret (QUIRE_KV_SECRET), and decode servers --kv-role decode; "
                      "meanwhile it computes prompts itself"}})
        return False

    async def _send_whole(self, answer: Answer, body: bytes) -> None:
        headers = [*self._headers_down(answer), (b"content-length", str(len(body)).encode())]
        self._start()
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _stream(self, answer: Answer, replica: Replica, ticket: Ticket) -> None:
        """Whole events only: where it breaks off, what follows must not stand in the middle of one."""
        piece, kept = await answer.read(), b""
        while piece and b"\n\n" not in piece and len(piece) <= _MOST_EVENT:  # with half an event nothing is sent yet
            more = await answer.read()
            piece += more
            if not more:
                break
        first = piece
        ticket.started()
        self._service.metrics.first_byte.observe(time.perf_counter() - self._record.started)
        self._service.noted(self._record.path, replica, first)
        self._start()
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers_down(answer)})
        while piece:
            if not piece.endswith(b"\n\n") or kept:
                piece = kept + piece
                end = piece.rfind(b"\n\n") + 2
                if end == 1:
                    end = len(piece) if len(piece) > _MOST_EVENT else 0
                piece, kept = piece[:end], piece[end:]
            if piece:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await answer.read()
        await self._send({"type": "http.response.body", "body": kept, "more_body": False})

    def _start(self) -> None:
        self._started = True
        self._on_start()

    def _headers_down(self, answer: Answer) -> list[tuple[bytes, bytes]]:
        found = [(name, value) for name, value in answer.headers if name in _PASSED_DOWN]
        return [*found, (b"x-quire-replica", str(self._tried[-1].number).encode())]

    async def _break_off(self, error: ApiError) -> None:
        """The stream has begun, so the status is spent: the error is its last event, in the words of its API."""
        self._record.facts["error"] = str(error)
        self._service.metrics.broken_streams += 1
        await self._send({"type": "http.response.body", "body": failure_event(self._record.path, error),
                          "more_body": False})


def passed_up(scope: Any) -> list[tuple[bytes, bytes]]:
    """Of the client's headers those that a server sees."""
    return [(name, value) for name, value in scope["headers"] if name in _PASSED_UP]


def content_digest(record: RequestRecord, body: bytes) -> bytes:
    head = f"{record.tenant}\n{record.path}\n".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(head + body, digest_size=16).digest()


def failure_event(path: str, error: ApiError) -> bytes:
    """The event that ends a stream of this route in the middle."""
    if path.startswith("/v1/messages"):
        return named_sse(error_body(error))
    if path.startswith("/v1/responses"):
        return named_sse({"type": "error", "code": error.code, "message": str(error), "param": None,
                          "sequence_number": 0})
    return sse(error.body())
