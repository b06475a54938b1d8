"""The transports by name, in the order in which a sender prefers them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import ConfigError
from quire.kvtransfer.transport.base import Transport
from quire.kvtransfer.transport.mooncake import MooncakeTransport
from quire.kvtransfer.transport.shm import ShmTransport
from quire.kvtransfer.transport.tcp import TcpTransport

TRANSPORTS = ("shm", "mooncake", "tcp")
DEFAULT_TRANSPORTS = ("shm", "tcp")

_MADE: dict[str, type[Transport]] = {"shm": ShmTransport, "mooncake": MooncakeTransport, "tcp": TcpTransport}


def transport(name: str) -> Transport:
    if name in _MADE:
        return _MADE[name]()
    raise ConfigError(f"there is no KV transport {name!r}; there are {', '.join(TRANSPORTS)}", "kv_transports")


def usable(names: Sequence[str]) -> list[Transport]:
    """Those of these that this machine has; ConfigError says what is missing where there is none."""
    made = [transport(name) for name in names]
    found = [each for each in made if each.missing() is None]
    if not found:
        reasons = "; ".join(f"{each.name}: {each.missing()}" for each in made)
        raise ConfigError(f"no KV transport can be used here ({reasons or 'none is named'})", "kv_transports")
    return found
