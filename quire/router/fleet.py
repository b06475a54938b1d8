"""All servers: asks each whether it is well, forgets those whose lease has run out, and chooses who gets a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.router.asked import Asked, error_of
from quire.router.policies import Candidate, Policy
from quire.router.replica import Replica, Role, State
from quire.router.upstream import Headers, Upstream, UpstreamError
from quire.server.api_error import ApiError
from quire.server.telemetry.log import LOGGER, event
from quire.server_config import RouterConfig

_MAX_SERVERS = 1024
_REMEMBERED = 64
_RARELY = 30
"""Questions about its health between two about its model, where it does not say."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who got a request, and why: for the page."""

    at: float
    number: int
    why: str
    tokens: int
    held: int
    role: str


class Fleet:
    """Lives on one event loop. `follow` is told of each server that comes, and gives a task that ends with it."""

    def __init__(self, config: RouterConfig, policy: Callable[[], Policy], own_headers: Headers = ()) -> None:
        self.config = config
        self.own_headers = own_headers
        """With questions of the router's own."""
        self.follow: Callable[[Replica], asyncio.Task[None]] | None = None
        self.on_gone: Callable[[Replica], None] | None = None
        """Told of a server that is forgotten."""
        self.decisions: deque[Decision] = deque(maxlen=_REMEMBERED)
        self.reasons: Counter[str] = Counter()
        self._policies = {role: policy() for role in Role}
        self._replicas: dict[str, Replica] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._count = 0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    # ---- who there is

    async def start(self, listed: Iterable[tuple[str, Role]]) -> None:
        """Ask the listed servers once; those that are not there yet are asked again for ever."""
        replicas = [self.add(url, role) for url, role in listed]
        await asyncio.gather(*(self._look(replica) for replica in replicas))
        for replica in replicas:
            if replica.state is not State.UP:
                event(logging.WARNING, "server_not_ready", url=replica.url, why=replica.why)

    def add(self, url: str, role: Role) -> Replica:
        url = _plain(url)
        if url in self._replicas:
            raise ConfigError(f"{url:.200} is listed twice", field="replicas")
        if len(self._replicas) >= _MAX_SERVERS:
            raise ConfigError(f"a router takes at most {_MAX_SERVERS} servers", field="replicas")
        replica = Replica(self._count, url, role, Upstream(url, self.config.connect_timeout))
        self._count += 1
        self._replicas[url] = replica
        tasks = self._tasks[url] = [asyncio.create_task(self._watch(replica), name=f"watch {url}")]
        if self.follow is not None:
            tasks.append(self.follow(replica))
        return replica

    def registered(self, url: str, role: Role, seconds: float) -> Replica:
        """A server says that it is there, and will say so again within `seconds`."""
        replica = self._replicas.get(_plain(url))
        if replica is None:
            replica = self.add(url, role)
            event(logging.INFO, "server_registered", url=url, role=role.value)
        elif replica.leased_until is None or replica.role is not role:
            return replica  # it is listed: what the command line says of it holds
        replica.leased_until = time.monotonic() + seconds
        return replica

    def leaves(self, url: str) -> None:
        """A registered server closes: it finishes what it has."""
        replica = self._replicas.get(_plain(url))
        if replica is not None and replica.leased_until is not None:
            replica.state, replica.why = State.DRAINING, "it says that it is closing"

    def _forget(self, replica: Replica) -> None:
        event(logging.WARNING, "server_forgotten", url=replica.url, why="it has not been heard of for its lease")
        del self._replicas[replica.url]
        replica.state, replica.why = State.DOWN, "its lease has run out"
        for task in self._tasks.pop(replica.url):
            if task is not asyncio.current_task():
                task.cancel()
        replica.upstream.cut("it has not been heard of")
        if self.on_gone is not None:
            self.on_gone(replica)

    # ---- who is well

    async def _watch(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            if replica.leased_until is not None and time.monotonic() > replica.leased_until \
                    and not replica.load.in_flight:
                self._forget(replica)
                return
            try:
                await self._look(replica)
            except Exception:  # whatever a server says, it is asked again
                LOGGER.exception("checking the health of a server failed")

    async def _look(self, replica: Replica) -> None:
        was = replica.state
        try:
            status, body = await replica.upstream.ask("GET", "/health", self.own_headers,
                                                      timeout=self.config.health_timeout)
            code, message = error_of(body)
            replica.answered_health(status, code == "closing", message or f"its health is {status}")
            replica.looks += 1
            if status == 200 and (was is not State.UP or (replica.model is None and replica.looks % _RARELY == 0)):
                await self._learn(replica)
        except UpstreamError as error:
            if replica.missed_health(str(error), gone=not error.reached) and was is not State.DOWN:
                replica.upstream.cut(f"the server does not answer ({error})")
        if replica.state is not was and State.UNKNOWN is not was:
            event(logging.INFO if replica.available else logging.WARNING, "server_state", url=replica.url,
                  state=replica.state.value, why=replica.why)

    async def _learn(self, replica: Replica) -> None:
        """Which model it has. One that does not say may be well all the same."""
        with contextlib.suppress(UpstreamError, ValueError, LookupError, TypeError, RecursionError):
            status, body = await replica.upstream.ask("GET", "/v1/models", self.own_headers,
                                                      timeout=self.config.health_timeout)
            card = json.loads(body)["data"][0] if status == 200 else {}
            if isinstance(card, dict) and isinstance(card.get("id"), str):
                replica.card, replica.model = card, card["id"]

    # ---- who gets a request

    def choose(self, roles: Collection[Role], asked: Asked,
               tried: Collection[Replica] = ()) -> tuple[Replica, int]:
        """A server for a request, and how much of the prompt it holds; raises 503 where there is none."""
        able = [each for each in self if each.role in roles and each.available and each not in tried]
        if asked.model is not None:
            able = [each for each in able if each.model == asked.model] or able
        if not able:
            raise ApiError(503, self._nobody(roles, tried), code="no_server", retry_after=1.0)
        num_tokens = asked.num_tokens
        candidates = [Candidate(each.url, each.load, min(asked.held.get(each.number, 0), num_tokens))
                      for each in able]
        role = Role.PREFILL if Role.PREFILL in roles else Role.BOTH
        choice = self._policies[role].choose(num_tokens, candidates)
        chosen, has = able[choice.place], candidates[choice.place].held
        self.decisions.append(Decision(time.time(), chosen.number, choice.why, num_tokens, has, role.value))
        return chosen, has

    def _nobody(self, roles: Collection[Role], tried: Collection[Replica]) -> str:
        if tried:
            return "no server could answer this request: those that there are have failed on it or take no more"
        states = Counter(each.state.value for each in self if each.role in roles)
        there = ", ".join(f"{count} {state}" for state, count in states.items()) or "none is known"
        return f"no server is ready to take this request ({there}): try again in a moment"

    # ---- an engine, as far as `quire.server.run` is concerned

    async def given_up(self) -> None:
        """A router has no engine that could be given up."""
        await asyncio.Event().wait()

    async def shutdown(self) -> None:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self:
            replica.upstream.cut("the router is closing")


def _plain(url: str) -> str:
    """The one way to write the address of a server."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
