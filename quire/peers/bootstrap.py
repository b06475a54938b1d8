"""Where another engine listens: named outright (kv://host:port), or told by its server (http://host:port).

The server's route answers whoever has its key, or a signature with the secret that the engines share.
"""

from __future__ import annotations

import hmac
import http.client
import json
import secrets
from urllib.parse import SplitResult, urlsplit

from quire.errors import PeerError

ROUTE = "/v1/kv/bootstrap"
SIGNATURE_HEADER = "X-Quire-Signature"
NONCE_HEADER = "X-Quire-Nonce"
_SECONDS = 5.0
_MOST_BYTES = 1 << 20


def endpoint_of(address: str, key: bytes) -> tuple[str, int]:
    """Host and port of the engine's listener."""
    parts = split_address(address)
    if parts.scheme == "kv":
        return parts.hostname or "", parts.port or 0
    return _ask(parts, key)


def split_address(address: str) -> SplitResult:
    """Raises PeerError for what is no address of an engine."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise PeerError(f"{address!r:.200} is no address: {error}") from error
    if parts.scheme not in ("kv", "http", "https") or not parts.hostname or (parts.scheme == "kv" and not port):
        raise PeerError(f"{address!r:.200} is no address of an engine: give kv://host:port, or http://host:port of its "
                        "server")
    return parts


def signature(key: bytes, nonce: str) -> str:
    """What proves to a server's bootstrap route that the asker has the secret."""
    return hmac.new(key, b"bootstrap" + nonce.encode(), "sha256").hexdigest()


def _ask(parts: SplitResult, key: bytes) -> tuple[str, int]:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    server = kind(parts.hostname or "", parts.port, timeout=_SECONDS)
    nonce = secrets.token_hex(16)
    try:
        server.request("GET", parts.path.rstrip("/") + ROUTE,
                       headers={NONCE_HEADER: nonce, SIGNATURE_HEADER: signature(key, nonce)})
        answer = server.getresponse()
        body = answer.read(_MOST_BYTES)
        if answer.status != 200:
            raise PeerError(f"its server answers {answer.status}: {body[:200].decode(errors='replace')}")
        data = json.loads(body)
        return _endpoint(data, parts.hostname or "")
    except (http.client.HTTPException, ValueError) as error:
        raise PeerError(f"its server does not say where its engine listens: {error}") from error
    finally:
        server.close()


def _endpoint(data: object, host: str) -> tuple[str, int]:
    match data:
        case {"host": str(listens), "port": int(port)} if 0 < port < 65536:
            # An engine that listens on all addresses is reached where its server is.
            return (host if listens in ("0.0.0.0", "::") else listens), port
    raise PeerError("its server does not say where its engine listens")
