"""Reads a server's KV events into the index; after a gap, another life or nonsense it starts over with the whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import msgspec

from quire.client.events import EventParser
from quire.errors import QuireError
from quire.router.index import KVIndex
from quire.router.replica import Replica, State
from quire.router.upstream import Headers, UpstreamError
from quire.server.telemetry.log import event

NAME_BYTES = 16
_VERSION = 1
_SILENT_SECONDS = 15.0
"""A server says that it is alive every two seconds, also where nothing happens."""
_PAUSE_SECONDS = 1.0
_LONG_PAUSE_SECONDS = 15.0
_MAX_BLOCK_SIZE = 1024
_MAX_EVENT_BYTES = 64 << 20


class _Event(msgspec.Struct):
    """Any line of the stream; fields that a kind does not have are empty."""

    type: str
    version: int = 0
    epoch: str = ""
    sequence: int = 0
    resumed: bool = False
    block_size: int = 0
    secret: str | None = None
    names: str | int = ""
    stored: str = ""
    evicted: str = ""
    cleared: bool = False


_decode = msgspec.json.Decoder(_Event).decode


class EventsError(QuireError):
    """A server's events cannot be followed, or not from here on."""


@dataclass(slots=True)
class Follower:
    """One server's events, read for as long as it is there."""

    replica: Replica
    index: KVIndex
    secret: str
    """The name of the secret that the router has."""
    headers: Headers
    _epoch: str = ""
    _sequence: int = 0

    async def run(self) -> None:
        while True:
            pause = _PAUSE_SECONDS
            if self.replica.state in (State.UP, State.DRAINING):
                try:
                    pause = await self._follow()
                except (UpstreamError, EventsError, TimeoutError) as error:
                    self._forget(f"lost: {error}")
                except Exception as error:  # a malformed event ends this server's feed, no other
                    event(logging.ERROR, "kv_events_failed", url=self.replica.url, why=repr(error))
                    self._forget("failed")
                    pause = _LONG_PAUSE_SECONDS
            elif self.index.held_by(self.replica.number):
                self._forget("the server is down")
            await asyncio.sleep(pause)

    def _forget(self, why: str) -> None:
        self.replica.events, self.replica.block_size = why, 0
        self._epoch, self._sequence = "", 0
        self.index.cleared(self.replica.number)

    async def _follow(self) -> float:
        """Until the stream ends; the seconds to wait before the next try."""
        answer = await self.replica.upstream.request(
            "GET", f"/v1/kv/events?epoch={self._epoch}&after={self._sequence}", self.headers)
        with contextlib.closing(answer):
            if answer.status != 200:
                self._forget({404: "none", 401: "no key"}.get(answer.status, f"refused ({answer.status})"))
                return _LONG_PAUSE_SECONDS
            parser = EventParser()
            while True:
                async with asyncio.timeout(_SILENT_SECONDS):
                    piece = await answer.read()
                if not piece:
                    return _PAUSE_SECONDS
                for data in parser.feed(piece):
                    if not self._take(data):
                        return _LONG_PAUSE_SECONDS
                if parser.pending > _MAX_EVENT_BYTES:
                    raise EventsError("an event that does not end")

    def _take(self, data: bytes) -> bool:
        """False where the stream is of no use."""
        try:
            found = _decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise EventsError(f"nonsense in the events: {type(error).__name__}") from None
        number = self.replica.number
        if found.type == "start":
            return self._start(found)
        if not self.replica.block_size:
            raise EventsError("events before their start")
        if found.type == "held":
            self.index.stored(number, _names(found.names))
        elif found.type == "change":
            if found.sequence != self._sequence + 1:
                raise EventsError(f"change {found.sequence} after {self._sequence}")
            self._sequence = found.sequence
            if found.cleared:
                self.index.cleared(number)
            self.index.evicted(number, _names(found.evicted))
            self.index.stored(number, _names(found.stored))
        return True

    def _start(self, found: _Event) -> bool:
        if found.version != _VERSION or not 1 <= found.block_size <= _MAX_BLOCK_SIZE:
            self._forget(f"of version {found.version}, which this router does not read")
            return False
        if found.secret != self.secret:
            self._forget("another secret")
            return False
        if not found.resumed:
            self.index.cleared(self.replica.number)
        self._epoch, self._sequence = found.epoch, found.sequence
        self.replica.events, self.replica.block_size = "following", found.block_size
        return True


def _names(text: str | int) -> list[bytes]:
    """Names in hexadecimal, one after the other."""
    try:
        joined = bytes.fromhex(text) if isinstance(text, str) else b"?"
    except ValueError:
        joined = b"?"
    if len(joined) % NAME_BYTES:
        raise EventsError("names that are none")
    return [joined[place : place + NAME_BYTES] for place in range(0, len(joined), NAME_BYTES)]
