"""What all routes of the router share: the servers, who may ask, limits, counters, and who stored which response."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from typing import Any

from quire.engine.front.quarantine import Quarantine
from quire.kvcache.secret import derived_secret
from quire.kvpool.index import IndexRoutes, MemoryIndex
from quire.router.asked import Asked
from quire.router.fleet import Fleet
from quire.router.holders import Holders
from quire.router.metrics import RouterMetrics
from quire.router.prefill import PrefillChoice
from quire.router.replica import Replica, Role
from quire.router.upstream import Headers, UpstreamError
from quire.server.access.auth import ApiKeys
from quire.server.access.places import Places
from quire.server.telemetry.tracing import Tracing
from quire.server_config import RouterConfig, ServerConfig

_RESPONSE_ID = re.compile(rb'"id":\s*"(resp[A-Za-z0-9._-]{1,128})"')
_RESPONSE_NAME = re.compile(r"[A-Za-z0-9._-]{1,132}")
_MOST_RESPONSES = 1 << 16
_MOST_RESPONSE_BYTES = 64 << 20


class RouterService:
    """`engine` is the fleet: what `quire.server.run` starts and stops."""

    model_name = "router"
    engine_config = None
    """It has no engine of its own."""

    def __init__(self, fleet: Fleet, config: ServerConfig, keys: ApiKeys, tracing: Tracing | None = None,
                 holders: Holders | None = None) -> None:
        self.engine = self.fleet = fleet
        self.holders = holders
        """Who finds who holds a prompt; None where the policy does not ask."""
        self.router: RouterConfig = fleet.config
        self.config = config
        self.keys = keys
        self.tracing = Tracing() if tracing is None else tracing
        self.metrics = RouterMetrics()
        self.draining = False
        self.active: set[asyncio.Task[Any]] = set()
        """Tasks that pass requests on now."""
        self.ending: set[asyncio.Task[Any]] = set()
        """Those of them that are cancelled because the router closes."""
        self.waiting = Places(fleet.config.max_waiting_requests, "too many requests wait for their first token: try "
                              "again later", "queue_full")
        self.quarantine = Quarantine(deaths=fleet.config.max_retries + 1)
        """Requests that were under way when servers failed, so that nobody can end them all by asking again."""
        secret = fleet.config.kv_secret
        self.prefill = PrefillChoice(fleet, secret)
        self.units = MemoryIndex()
        """Which engine's host memory holds which units of the KV pool, for engines with `--kv-pool http://ROUTER`."""
        self.unit_routes = None if secret is None else IndexRoutes(self.units, derived_secret(secret, "kv-index"))
        self._stored: OrderedDict[str, Replica] = OrderedDict()
        """By id of a response: the server that has it."""

    async def look(self, path: str, body: bytes, tenant: str | None, asked: Asked) -> None:
        """Find out how long the prompt is and who holds how much of it, where the policy goes by that."""
        if self.holders is None:
            return
        began = time.perf_counter()
        await self.holders.look(path, body, tenant, asked)
        self.metrics.choosing.observe(time.perf_counter() - began)

    @property
    def num_blocks(self) -> int:
        """KV blocks that the index knows of."""
        return 0 if self.holders is None else self.holders.index.num_blocks

    def blocks_of(self, replica: Replica) -> int:
        """Those of them that this server holds."""
        return 0 if self.holders is None else self.holders.index.held_by(replica.number)

    def noted(self, path: str, replica: Replica, beginning: bytes) -> None:
        """The beginning of an answer, or all of it: a response is stored where it was made."""
        if not path.startswith("/v1/responses"):
            return
        found = _RESPONSE_ID.search(beginning[:65536])
        if found is not None:
            self._remember(found[1].decode(), replica)

    async def who_stored(self, response: str, headers: Headers) -> Replica | None:
        """The server that has a stored response. One that this router has not seen being made (it was restarted, or is
        one of several) is asked for at every server, with the client's own key in `headers`."""
        if response in self._stored or not _RESPONSE_NAME.fullmatch(response):
            return self._stored.get(response)
        able = [each for each in self.fleet if each.available and each.role is not Role.PREFILL]
        found = await asyncio.gather(*(self._has(each, response, headers) for each in able))
        for replica, has in zip(able, found, strict=True):
            if has:
                self._remember(response, replica)
                return replica
        return None

    async def _has(self, replica: Replica, response: str, headers: Headers) -> bool:
        try:
            status, _ = await replica.upstream.ask("GET", f"/v1/responses/{response}", headers,
                                                   timeout=self.router.health_timeout, most=_MOST_RESPONSE_BYTES)
        except UpstreamError:
            return False
        return status == 200

    def _remember(self, response: str, replica: Replica) -> None:
        self._stored[response] = replica
        while len(self._stored) > _MOST_RESPONSES:
            self._stored.popitem(last=False)

    def close(self) -> None:
        self.metrics.loop_lag.close()
        if self.holders is not None:
            self.holders.close()
