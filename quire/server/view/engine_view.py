"""The view of the engine over HTTP: its frames for everybody who watches, and scenarios on small engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from quire.server.access.places import Place, Places
from quire.server.answer import encode, send_json
from quire.server.api_error import ApiError, refusal
from quire.server.body import read_body
from quire.server.generation import until_disconnect
from quire.server.openai_api.protocol import Strict
from quire.server.service import RequestRecord, Service
from quire.server.view.scenarios import SCENARIOS, play

_LEASE_SECONDS = 6.0
_RENEW_SECONDS = 2.0
_QUIET_SECONDS = 1.0
"""After so long without news a reader gets a comment, so that a connection that is gone is noticed."""
_MAX_WATCHERS = 16
_MAX_STORIES = 4
_MAX_PENDING = 32
"""Frames that may wait for a slow reader; then it starts over with a full one."""
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no")]


class Watcher:
    """One reader of frames."""

    def __init__(self, place: Place) -> None:
        self.pending: deque[tuple[int, bytes]] = deque()
        """Frames that wait for it, each with the number of its engine."""
        self.behind = True
        """It has missed something, so it waits for full frames."""
        self._seen: set[int] = set()
        """Engines of which it has a full frame and all since."""
        self.news = asyncio.Event()
        self._place = place
        place.on_lost = self.news.set

    @property
    def lost_place(self) -> bool:
        """A key with fewer watchers has taken its place."""
        return self._place.lost

    def take(self, body: bytes, full: bool, engine: int = 0) -> bool:
        """False where it has fallen behind and needs a full frame."""
        if full:
            self.pending = deque(each for each in self.pending if each[0] != engine)
            self._seen.add(engine)
            self.behind = False
        elif len(self.pending) >= _MAX_PENDING:
            self.pending.clear()
            self._seen.clear()
            self.behind = True
        if engine not in self._seen:
            return False
        self.pending.append((engine, body))
        self.news.set()
        return True


class Lookout:
    """Hands the engine's frames to all watchers; while there are none, the engine makes none."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._watchers: set[Watcher] = set()
        self._places = Places(_MAX_WATCHERS, f"{_MAX_WATCHERS} others watch the engine already", "too_many_watchers")
        self._renewing: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watcher(self, tenant: str | None) -> Any:
        with self._places.take(tenant) as place:
            watcher = Watcher(place)
            self._watchers.add(watcher)
            self._engine.on_view = self._take
            self._engine.watch(_LEASE_SECONDS, True)
            if self._renewing is None:
                self._renewing = asyncio.create_task(self._renew(), name="quire-lookout")
            try:
                yield watcher
            finally:
                self._watchers.discard(watcher)

    def _take(self, body: bytes, full: bool, engine: int = 0) -> None:
        for watcher in self._watchers:
            watcher.take(body, full, engine)

    async def _renew(self) -> None:
        """Also after the engine was restarted: the new one begins with a full frame by itself."""
        while self._watchers:
            await asyncio.sleep(_RENEW_SECONDS)
            if self._watchers:
                self._engine.watch(_LEASE_SECONDS, any(watcher.behind for watcher in self._watchers))
        self._engine.watch(0.0)
        self._renewing = None


class PlayBody(Strict):
    scenario: str
    speed: float | None = Field(None, ge=0.1, le=50, description="1: as the story's clock says")


class EngineView:
    """The handlers, and what they share."""

    def __init__(self, service: Service) -> None:
        self._lookout = Lookout(service.engine)
        self._stories = Places(_MAX_STORIES, f"{_MAX_STORIES} scenarios play already", "too_many_scenarios")

    async def events(self, service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
        """A frame for each tenth of a second in which something happened, for as long as the client likes."""
        with self._lookout.watcher(record.tenant) as watcher:
            async with until_disconnect(receive, lambda: False):
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                async for body in self._frames(watcher, service):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self, watcher: Watcher, service: Service) -> AsyncIterator[bytes]:
        while not service.draining and not watcher.lost_place:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_QUIET_SECONDS):
                    await watcher.news.wait()
            watcher.news.clear()
            if watcher.lost_place:
                yield b": another key has taken this place\n\n"
            elif not watcher.pending:
                yield b": nothing new\n\n"
            while watcher.pending:
                yield b"data: " + watcher.pending.popleft()[1] + b"\n\n"

    async def snapshot(self, service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
        """One full frame."""
        with self._lookout.watcher(record.tenant) as watcher:
            try:
                async with asyncio.timeout(5.0), until_disconnect(receive, lambda: False):
                    await watcher.news.wait()
            except TimeoutError:
                raise ApiError(503, "the engine did not answer in time", code="engine_busy", retry_after=1.0) from None
            if not watcher.pending:
                raise ApiError(429, "another key has taken this place: try again later", code="too_many_watchers",
                               retry_after=5.0)
            await send_json(send, 200, watcher.pending[0][1])

    async def scenarios(self, service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
        await send_json(send, 200, encode({"data": [scenario.card() for scenario in SCENARIOS.values()]}))

    async def play(self, service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
        """A scenario on small engines of its own: frames as those of `events`, and a summary in the end."""
        body = await read_body(scope, receive, PlayBody, service.config)
        scenario = SCENARIOS.get(body.scenario)
        if scenario is None:
            raise refusal("scenario", f"must be one of {', '.join(SCENARIOS)}, not {body.scenario!r:.80}")
        with self._stories.take(record.tenant) as place:
            async with (until_disconnect(receive, lambda: False),
                        contextlib.aclosing(play(scenario, body.speed or 1.0)) as story):
                await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                async for found in story:
                    data = found if isinstance(found, bytes) else encode(found)
                    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
                    if service.draining or place.lost:
                        break
                await send({"type": "http.response.body", "body": b"", "more_body": False})
