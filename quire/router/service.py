"""What all routes of the router share: the servers, who may ask, limits, counters, and who stored which response."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from typing import Any

from quire.config import RouterConfig, ServerConfig
from quire.router.asked import Asked
from quire.router.fleet import Fleet
from quire.router.metrics import RouterMetrics
from quire.router.replica import Replica
from quire.server.auth import ApiKeys
from quire.server.places import Places
from quire.server.tracing import Tracing

_RESPONSE_ID = re.compile(rb'"id":\s*"(resp[A-Za-z0-9._-]{1,128})"')
_MOST_RESPONSES = 1 << 16


class RouterService:
    """`engine` is the fleet: what `quire.server.run` starts and stops."""

    model_name = "router"

    def __init__(self, fleet: Fleet, config: ServerConfig, keys: ApiKeys, tracing: Tracing | None = None) -> None:
        self.engine = self.fleet = fleet
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
        self._stored: OrderedDict[str, Replica] = OrderedDict()
        """By id of a response: the server that has it."""

    def held(self, replica: Replica, asked: Asked) -> int:
        """Tokens of the prompt whose KV the server has."""
        return 0

    def extra_headers(self, asked: Asked, replica: Replica) -> list[tuple[bytes, bytes]]:
        """What the router tells the server beside the client's own."""
        return []

    def noted(self, path: str, replica: Replica, beginning: bytes) -> None:
        """The beginning of an answer, or all of it: a response is stored where it was made."""
        if not path.startswith("/v1/responses"):
            return
        found = _RESPONSE_ID.search(beginning[:65536])
        if found is not None:
            self._stored[found[1].decode()] = replica
            while len(self._stored) > _MOST_RESPONSES:
                self._stored.popitem(last=False)

    def who_stored(self, response: str) -> Replica | None:
        return self._stored.get(response)

    def close(self) -> None:
        """Nothing is left open that the fleet does not close."""
