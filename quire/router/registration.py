"""Servers that say by themselves that they are there: the heartbeat of a server, and what a router makes of it.

A message is signed with the secret that both share, and carries its time: nobody else can bring a server of his own
among the others, and an old message is of no use. A router without a secret takes messages only where nobody else could
send any: on a loopback address, without API keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from quire.errors import ConfigError
from quire.kvcache.secret import derived_secret
from quire.router.replica import Role
from quire.router.service import RouterService
from quire.router.upstream import Upstream, UpstreamError
from quire.server.access.hosts import is_loopback
from quire.server.answer import encode, send_json
from quire.server.api_error import ApiError, refusal
from quire.server.body import read_json
from quire.server.service import RequestRecord
from quire.server.telemetry.log import event
from quire.server_config import ServerConfig

PATH = "/v1/router/servers"
SIGNATURE = b"x-quire-signature"
BEAT_SECONDS = 2.0
LEASE_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_OLDEST_SECONDS = 60.0


class Beat(msgspec.Struct, forbid_unknown_fields=True):
    """One heartbeat."""

    url: str
    role: str = "both"
    time: float = 0.0
    leaving: bool = False


_decode = msgspec.json.Decoder(Beat).decode


def _signed(secret: bytes, body: bytes) -> bytes:
    return hmac.new(derived_secret(secret, "registration"), body, hashlib.sha256).hexdigest().encode()


# ---- the router's side


async def take_beat(service: RouterService, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    """POST /v1/router/servers."""
    body = await read_json(scope, receive, service.config)
    signature = next((value for name, value in scope["headers"] if name == SIGNATURE), b"")
    _check_signature(service, body, signature)
    try:
        beat = _decode(body)
        role = Role(beat.role)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise refusal("body", f"is no heartbeat of a server: {error}") from None
    if abs(time.time() - beat.time) > _OLDEST_SECONDS:
        raise refusal("time", f"is more than {_OLDEST_SECONDS:g} seconds from the router's: set the clocks")
    try:
        if beat.leaving:
            service.fleet.leaves(beat.url)
        else:
            service.fleet.registered(beat.url, role, LEASE_SECONDS)
    except ConfigError as error:
        raise refusal("url", str(error)) from None
    await send_json(send, 200, encode({"lease_seconds": LEASE_SECONDS}))


def _check_signature(service: RouterService, body: bytes, signature: bytes) -> None:
    secret = service.router.kv_secret
    if secret is None:
        if len(service.keys) or not is_loopback(service.config.host):
            raise ApiError(403, "this router takes no servers that register themselves: give it and them a secret "
                                "(QUIRE_KV_SECRET)", code="no_registrations")
    elif not hmac.compare_digest(_signed(secret, body), signature):
        raise ApiError(403, "the signature is wrong: server and router need the same secret (QUIRE_KV_SECRET)",
                       code="wrong_signature")


# ---- the server's side


class Heartbeat:
    """Tells a router that this server is there, until it is closing (`draining`); then it says goodbye."""

    def __init__(self, router: str, url: str, secret: bytes | None, role: str = "both") -> None:
        self._upstream = Upstream(router.rstrip("/").removesuffix("/v1"))
        self._url, self._secret, self._role = url, secret, role
        self._heard: str | None = ""
        """What went wrong the last time; None while all is well."""

    async def run(self, draining: Callable[[], bool]) -> None:
        while not draining():
            await self.beat()
            until = time.monotonic() + BEAT_SECONDS
            while time.monotonic() < until and not draining():
                await asyncio.sleep(_LOOK_SECONDS)
        await self.beat(leaving=True)
        self._upstream.cut("done")

    async def beat(self, leaving: bool = False) -> None:
        body = encode(Beat(self._url, self._role, time.time(), leaving))
        headers = [(b"content-type", b"application/json")]
        if self._secret is not None:
            headers.append((SIGNATURE, _signed(self._secret, body)))
        try:
            status, answer = await self._upstream.ask("POST", PATH, headers, body, timeout=5.0)
            wrong = None if status == 200 else f"{status} {answer[:200].decode(errors='replace')}"
        except UpstreamError as error:
            wrong = str(error)
        if wrong != self._heard:
            event(logging.INFO if wrong is None else logging.WARNING, "registered" if wrong is None else
                  "not_registered", router=self._upstream.url, url=self._url, why=wrong)
        self._heard = wrong


def check_registration(config: ServerConfig) -> None:
    """Raises ConfigError where a server that is to register itself cannot say under which address."""
    if config.register is None:
        return
    Upstream(config.register)
    if config.advertise is not None:
        Upstream(config.advertise)
    elif config.host in ("0.0.0.0", "::"):
        raise ConfigError(f"a server on {config.host} must say under which address the router reaches it: give "
                          "--advertise http://HOST:PORT", field="advertise")


def heartbeat_of(config: ServerConfig, address: str, secret: bytes | None, role: str = "both") -> Heartbeat:
    """For a server that listens at `address`."""
    assert config.register is not None
    return Heartbeat(config.register, (config.advertise or address).rstrip("/"), secret, role)
