"""Puts a router together: the servers it was told of, and the application in front of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from quire.config import RouterConfig, ServerConfig, replica_key_of_environment
from quire.router.fleet import Fleet
from quire.router.policies import make_policy
from quire.router.replica import Role
from quire.router.routes import ROUTES
from quire.router.service import RouterService
from quire.server.app import App
from quire.server.auth import ApiKeys
from quire.server.tracing import Tracing


async def start_fleet(config: RouterConfig, servers: Iterable[tuple[str, Role]]) -> Fleet:
    """Who there is, asked once how they are."""
    key = replica_key_of_environment()
    fleet = Fleet(config, partial(make_policy, config.policy),
                  [] if key is None else [(b"authorization", b"Bearer " + key.encode("latin-1", "replace"))])
    await fleet.start(servers)
    return fleet


def build_router(fleet: Any, config: ServerConfig, *, keys: ApiKeys | None = None,
                 tracing: Tracing | None = None) -> App:
    """The application in front of the servers."""
    return App(RouterService(fleet, config, ApiKeys.of(config) if keys is None else keys, tracing), ROUTES)
