"""Puts a router together: the servers it was told of, who knows what they hold, and the application in front."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from quire.router.fleet import Fleet
from quire.router.holders import Holders, start_holders
from quire.router.policies import make_policy
from quire.router.replica import Role
from quire.router.routes import ROUTES
from quire.router.service import RouterService
from quire.server.access.auth import ApiKeys
from quire.server.app import App
from quire.server.telemetry.tracing import Tracing
from quire.server.view.page_routes import file_routes
from quire.server_config import RouterConfig, ServerConfig, replica_key_of_environment

_SHARED_FILES = ("api.js", "key.js", "theme.js", "style.css", "icon.svg")
"""Of the server's page, which the router's uses too."""


@dataclass(frozen=True, slots=True)
class Started:
    """What stands behind the application; for `quire.server.run` it is in the place of an engine."""

    fleet: Fleet
    holders: Holders | None

    async def shutdown(self) -> None:
        await self.fleet.shutdown()


async def start_router(config: RouterConfig, servers: Iterable[tuple[str, Role]]) -> Started:
    """Who there is, asked once how they are."""
    key = replica_key_of_environment()
    fleet = Fleet(config, partial(make_policy, config.policy),
                  [] if key is None else [(b"authorization", b"Bearer " + key.encode("latin-1", "replace"))])
    holders = await start_holders(fleet)
    await fleet.start(servers)
    return Started(fleet, holders)


def build_router(started: Started, config: ServerConfig, *, keys: ApiKeys | None = None,
                 tracing: Tracing | None = None) -> App:
    """The application in front of the servers."""
    keys = ApiKeys.of(config) if keys is None else keys
    page = [*file_routes("quire.router"), *file_routes("quire.server", _SHARED_FILES)] if config.page else []
    return App(RouterService(started.fleet, config, keys, tracing, started.holders), (*ROUTES, *page))
