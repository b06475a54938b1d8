"""Which names a request may give as the server's: a page elsewhere whose name leads to this machine gets no answer."""

from __future__ import annotations

import ipaddress
import re

from quire.server_config import ServerConfig

_NAME_AND_PORT = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]*)?")


class AllowedHosts:
    """A web page may call any server that its own name resolves to, and its name may resolve to 127.0.0.1 (DNS
    rebinding); its browser then sends that name as the Host. Where nobody needs a key that must not be enough."""

    def __init__(self, config: ServerConfig, has_keys: bool) -> None:
        given = config.allowed_hosts
        names = {name.strip().lower() for name in (given or "").split(",") if name.strip()}
        self._any = "*" in names or (given is None and (has_keys or not is_loopback(config.host)))
        self._names = names | {config.host.lower()}

    def allows(self, host: bytes | None) -> bool:
        """None is a client of HTTP/1.0, which browsers are not."""
        if self._any or host is None:
            return True
        name = _without_port(host.decode("latin-1").strip().lower())
        return is_loopback(name) or name.endswith(".localhost") or name in self._names


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


def _without_port(host: str) -> str:
    """The name alone; nothing where it is no name, or what follows it no port."""
    found = _NAME_AND_PORT.fullmatch(host)
    return "" if found is None else found[1]
