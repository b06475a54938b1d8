"""Which server computes the prompt for a decode server: said in a header that only the router can sign."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from quire.kvcache.secret import derived_secret
from quire.router.asked import Asked
from quire.router.fleet import Fleet
from quire.router.load import Ticket
from quire.router.replica import Replica, Role
from quire.server.api_error import ApiError

HEADER, SIGNATURE = b"x-quire-prefill", b"x-quire-prefill-signature"
_MOST = 2
"""Servers that are named, the first choice first."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a decode server is told; `ticket` is the place of the request at the first prefill server."""

    headers: list[tuple[bytes, bytes]]
    ticket: Ticket | None


class PrefillChoice:
    def __init__(self, fleet: Fleet, secret: bytes | None) -> None:
        self._fleet = fleet
        self._key = None if secret is None else derived_secret(secret, "prefill-header")

    def choose(self, asked: Asked) -> Prefill:
        """None is named where there is none: the decode server computes the prompt itself."""
        named: list[Replica] = []
        ticket = None
        while len(named) < _MOST:
            try:
                replica, held = self._fleet.choose((Role.PREFILL,), asked, named)
            except ApiError:
                break
            if ticket is None:
                ticket = replica.load.send(max(1, asked.num_tokens - held))
            named.append(replica)
        if not named:
            return Prefill([], None)
        value = ",".join(replica.url for replica in named).encode()
        headers = [(HEADER, value)]
        if self._key is not None:
            headers.append((SIGNATURE, hmac.new(self._key, value, hashlib.sha256).hexdigest().encode()))
        return Prefill(headers, ticket)
