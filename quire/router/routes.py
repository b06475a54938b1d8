"""The router's routes: those of the servers, which it passes on, and its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from quire.kvpool.index import ROUTES as UNIT_PATHS
from quire.kvpool.index import SIGNATURE as UNIT_SIGNATURE
from quire.router.asked import Asked, asked_of
from quire.router.passage import Passage, passed_up
from quire.router.registration import PATH, take_beat
from quire.router.replica import Replica, Role, State
from quire.router.service import RouterService
from quire.server.answer import encode, send_json
from quire.server.api_error import ApiError
from quire.server.body import read_json
from quire.server.generation import until_disconnect
from quire.server.route import Route
from quire.server.routes import ROUTES as SERVER_ROUTES
from quire.server.service import RequestRecord
from quire.version import __version__

_METRICS_TYPE = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_OWN = {"/health", "/metrics", "/version", "/v1/models", "/v1/models/{model}", "/openapi.json",
        "/docs", "/v1/kv/events", "/v1/kv/bootstrap"}
"""Paths of the servers' that the router answers itself, or not at all."""


@contextlib.asynccontextmanager
async def _passing(service: RouterService, receive: Any) -> AsyncIterator[None]:
    """While a request is under way: it ends with its client, and the router waits for it before it closes."""
    task = asyncio.current_task()
    assert task is not None
    service.active.add(task)
    try:
        async with until_disconnect(receive, lambda: task in service.ending):
            yield
    finally:
        service.ending.discard(task)
        service.active.discard(task)


async def _work(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    """A request with a body: any server may answer it."""
    body = await read_json(scope, receive, service.config)
    asked = asked_of(body)
    with contextlib.ExitStack() as waiting, _displaceable(service, record.tenant, waiting):
        async with _passing(service, receive):
            only = await _owner(service, asked.after, scope)
            await service.look(record.path, body, record.tenant, asked)
            passage = Passage(service, record, scope, send, body, asked, on_start=waiting.close)
            await passage.run(service.config.request_timeout, only)


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


@contextlib.contextmanager
def _displaceable(service: RouterService, tenant: str | None, waiting: contextlib.ExitStack) -> Iterator[None]:
    """Takes a place among those that wait, which `waiting` gives back; 429 where a key with less needed it more."""
    task = asyncio.current_task()
    assert task is not None
    place = waiting.enter_context(service.waiting.take(tenant))
    place.on_lost = functools.partial(_cancel, task)
    try:
        yield
    except asyncio.CancelledError:
        if not place.lost:
            raise
        task.uncancel()
        raise ApiError(429, "too many requests wait, and others who wait have fewer: try again later",
                       code="queue_full", retry_after=5.0) from None


async def _stored(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    """A question about a stored response, which goes to the server that has it."""
    name = scope["path"].removeprefix("/v1/responses/")
    if "/" in name or name in (".", ".."):  # what OpenAI has below a response, or another path in disguise
        raise ApiError(404, f"there is no {scope['path']:.200} on this server; GET /docs lists what there is",
                       code="unknown_path")
    async with _passing(service, receive):
        only = await _owner(service, name, scope)
        passage = Passage(service, record, scope, send, b"", Asked(1))
        await passage.run(service.config.request_timeout, only)


async def _owner(service: RouterService, response: str | None, scope: Any) -> Replica | None:
    """The server that stored a response; None where none is asked for, or nobody has it."""
    return None if response is None else await service.who_stored(response, passed_up(scope))


async def _health(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    """Well while there is a server that takes requests."""
    if service.draining:
        raise ApiError(503, "the router is closing", code="closing", retry_after=1.0)
    states = [replica.state.value for replica in service.fleet if replica.role is not Role.PREFILL]
    if State.UP.value not in states:
        raise ApiError(503, "no server is ready", code="no_server", retry_after=1.0)
    await send_json(send, 200, encode({"status": "ok", "servers_up": states.count("up"), "servers": len(states)}))


async def _metrics(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, 200, service.metrics.render(service.fleet, service.num_blocks), _METRICS_TYPE)


async def _version(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, 200, encode({"version": __version__}))


async def _models(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    cards = list({replica.model: replica.card for replica in service.fleet
                  if replica.model is not None and replica.state is State.UP}.values())
    if not cards:
        raise ApiError(503, "no server is ready", code="no_server", retry_after=1.0)
    await send_json(send, 200, encode({"object": "list", "data": cards, "has_more": False,
                                       "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}))


async def _model(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    name = scope["path"].removeprefix("/v1/models/")
    card = next((replica.card for replica in service.fleet if replica.model == name), None)
    if card is None:
        raise ApiError(404, f"no server has the model {name!r:.200}", param="model", code="model_not_found")
    await send_json(send, 200, encode(card))


def _servers_view(service: RouterService) -> dict[str, Any]:
    now = time.time()
    return {
        "policy": service.router.policy,
        "servers": [{"number": each.number, "url": each.url, "role": each.role.value, "state": each.state.value,
                     "why": each.why, "model": each.model, "waiting": each.load.waiting,
                     "waiting_tokens": each.load.waiting_tokens, "running": each.load.running, "sent": each.load.sent,
                     "outcomes": dict(each.outcomes), "events": each.events,
                     "blocks": service.blocks_of(each), "block_size": each.block_size,
                     "registered": each.leased_until is not None}
                    for each in service.fleet],
        "pool": service.units.owners,
        "decisions": [{"ago": round(now - each.at, 1), "server": each.number, "why": each.why, "tokens": each.tokens,
                       "held": each.held, "role": each.role} for each in reversed(service.fleet.decisions)],
    }


async def _servers(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, 200, encode(_servers_view(service)))


async def _openapi(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    from quire.server.openai_api.openapi import document

    await send_json(send, 200, encode(document(ROUTES, needs_key=len(service.keys) > 0)))


async def _units(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    """The index of a KV pool, for engines that share the router's secret."""
    if service.unit_routes is None:
        raise ApiError(403, "this router keeps no index: it needs the engines' secret (QUIRE_KV_SECRET)",
                       code="no_kv_secret")
    body = await read_json(scope, receive, service.config)
    signature = next((value.decode("latin-1") for name, value in scope["headers"]
                      if name == UNIT_SIGNATURE.lower().encode()), None)
    await send_json(send, *service.unit_routes.handle(scope["path"], body, signature))


def _passed_on() -> list[Route]:
    """The servers' own routes, with the router's way of answering them."""
    found = []
    for route in SERVER_ROUTES:
        if route.path not in _OWN:
            handler = _work if route.takes is not None else _stored
            found.append(Route(route.method, route.path, route.summary, handler, route.takes, route.gives, route.media,
                               works=route.works, streams=route.streams, error_body=route.error_body))
    return found


ROUTES: tuple[Route, ...] = (
    *_passed_on(),
    Route("GET", "/v1/models", "The models that the servers have", _models),
    Route("GET", "/v1/models/{model}", "One of them", _model),
    Route("GET", "/v1/router/servers", "The servers, what they have to do, and who got what and why", _servers),
    *(Route("POST", path, "The index of a KV pool, for engines", _units, open=True) for path in UNIT_PATHS),
    Route("POST", PATH, "A server says that it is there", take_beat, open=True),
    Route("GET", "/health", "200 while a server takes requests", _health, open=True, also=("503",)),
    Route("GET", "/metrics", "Prometheus metrics", _metrics, media="text/plain"),
    Route("GET", "/version", "Quire's version", _version),
    Route("GET", "/openapi.json", "This document", _openapi),
    *(route for route in SERVER_ROUTES if route.path == "/docs"),
)
