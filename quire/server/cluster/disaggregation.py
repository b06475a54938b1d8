"""Prompts that other engines compute: who may be named in a request's header, and where this server's engine listens.

A request must not make the server talk to whomever it likes. So a header names servers that the operator has allowed
(`kv_peers`), or it is signed with the secret that front and engines share.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

from quire.config import EngineConfig
from quire.errors import PeerError
from quire.kvcache.secret import derived_secret
from quire.peers.bootstrap import NONCE_HEADER, SIGNATURE_HEADER, signature, split_address
from quire.server.answer import encode, send_json
from quire.server.api_error import ApiError
from quire.server.service import RequestRecord, Service

PREFILL_HEADER = b"x-quire-prefill"
PREFILL_SIGNATURE_HEADER = b"x-quire-prefill-signature"
_MOST_PEERS = 16


class PrefillHeader:
    """Reads X-Quire-Prefill: addresses of prefill servers, separated by commas, to be asked in this order."""

    def __init__(self, options: object) -> None:
        """`options` of whoever answers requests; other ones than an engine's ask nobody."""
        config = options if isinstance(options, EngineConfig) else None
        self._asks = config is not None and config.transfer.asks
        self._allowed = {} if config is None else {_plain(each): each for each in config.transfer.peers}
        secret = None if config is None else config.cache.kv_secret
        self._key = None if secret is None else derived_secret(secret, "prefill-header")

    def named(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...] | None:
        """Whom a request asks to compute its prompt; None if it does not say. Raises ApiError where it may not."""
        given = [value for name, value in headers if name == PREFILL_HEADER]
        if not given:
            return None
        if len(given) > 1:
            raise _refused("is there more than once: separate the addresses by commas")
        if not self._asks:
            raise _refused("names servers to ask for the prompt, and this server asks none: start it with --kv-role "
                           "decode")
        names = tuple(each.strip() for each in given[0].decode("latin-1").split(",") if each.strip())
        if len(names) > _MOST_PEERS:
            raise _refused(f"names {len(names)} servers; at most {_MOST_PEERS} are asked")
        signatures = [value for name, value in headers if name == PREFILL_SIGNATURE_HEADER]
        if not self._signed(given[0], signatures):
            for name in names:
                if _plain(name) not in self._allowed:
                    raise _refused(f"names {name!r:.200}, which is not one of this server's --kv-peers")
        # As the operator spells them: the engine keeps a link for each spelling, and clients must not make up more.
        names = tuple(self._allowed.get(_plain(name), name) for name in names)
        for name in names:
            try:
                split_address(name)
            except PeerError as error:
                raise _refused(str(error)) from error
        return names

    def _signed(self, value: bytes, signatures: list[bytes]) -> bool:
        if self._key is None or len(signatures) != 1:
            return False
        return hmac.compare_digest(hmac.new(self._key, value, "sha256").hexdigest().encode(), signatures[0])


def _refused(what: str) -> ApiError:
    return ApiError(400, f"the header X-Quire-Prefill {what}", param="X-Quire-Prefill", code="prefill_not_allowed")


def _plain(address: str) -> str:
    return address.strip().rstrip("/").lower()


async def kv_bootstrap(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    """Where this engine takes prefill requests: for clients with a key of the server or the engines' secret."""
    headers = dict(scope["headers"])
    if len(service.keys) and not _has_secret(service, headers):
        key = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
        record.tenant = service.keys.tenant(key)
        if record.tenant is None:
            raise ApiError(401, "an API key, or a signature with the engines' secret, is needed",
                           code="invalid_api_key")
    listens = service.engine.kv_listens
    if listens is None:
        raise ApiError(404, "this server computes no prompts for others: start it with --kv-role prefill",
                       code="not_a_prefill_server")
    await send_json(send, 200, encode({"host": listens[0], "port": listens[1]}))


def _has_secret(service: Service, headers: dict[bytes, bytes]) -> bool:
    secret = None if service.engine_config is None else service.engine_config.cache.kv_secret
    nonce, given = headers.get(NONCE_HEADER.lower().encode()), headers.get(SIGNATURE_HEADER.lower().encode())
    if secret is None or nonce is None or given is None or not 16 <= len(nonce) <= 128:
        return False
    expected = signature(derived_secret(secret, "peers"), nonce.decode("latin-1"))
    return hmac.compare_digest(expected.encode(), given)
