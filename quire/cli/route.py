"""`quire route`: One address in front of many servers: the OpenAI API, passed on to whoever answers soonest.

Start the servers first (`quire serve`), then list them here. Each request goes to one of them, by --policy; the answer
is passed on as it comes. A server that dies is noticed at once: requests that have sent nothing go to another one, the
others end with an error in their stream, and nobody is sent there again until it is well. Clients talk to the router as
to a server: the same routes, the same keys (give both the same --api-key-file)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
from typing import Any, NoReturn

from quire.cli.options import add_options_of, options_of
from quire.server_config import RouterConfig, ServerConfig

EXAMPLES = (
    "examples:\n"
    "  two servers, and a router in front of them:\n"
    "    export QUIRE_KV_SECRET=$(openssl rand -hex 32)    # shared, so that the router knows who holds which prefix\n"
    "    quire serve --port 8001 &\n"
    "    quire serve --port 8002 &\n"
    "    quire route --replicas http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000\n"
    "  by load alone:\n"
    "    quire route --replicas http://10.0.0.1:8000 http://10.0.0.2:8000 --policy least-loaded\n"
    "  servers that come and go (they say so with `quire serve --register http://ROUTER:8000`):\n"
    "    quire route --port 8000\n"
    "  prompts computed by some servers, answers written by others (all with the same QUIRE_KV_SECRET):\n"
    "    quire route --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 http://10.0.0.3:8000\n"
    "  who holds what, who got what and why: http://127.0.0.1:8000/ in a browser, or\n"
    "    curl http://127.0.0.1:8000/v1/router/servers"
)
_SERVER_PREFIX, _ROUTER_PREFIX = "server:", "router:"
_SHARED = ("host", "port", "api_key_file", "allowed_origins", "allowed_hosts", "request_timeout", "read_timeout",
           "drain_timeout", "max_connections", "max_body_size", "log_format", "log_level", "page", "otlp_endpoint")
"""Options of `quire serve` that a router has too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("servers")
    servers.add_argument("--replicas", nargs="+", metavar="URL", default=[], help="servers that do everything")
    servers.add_argument("--prefill", nargs="+", metavar="URL", default=[],
                         help="servers that compute prompts for --decode servers")
    servers.add_argument("--decode", nargs="+", metavar="URL", default=[],
                         help="servers that answer requests, and get the KV of prompts from --prefill servers")
    add_options_of(parser, "routing", _ROUTER_PREFIX, dataclasses.fields(RouterConfig))
    add_options_of(parser, "listening", _SERVER_PREFIX,
                   [f for f in dataclasses.fields(ServerConfig) if f.name in _SHARED])


def run(args: argparse.Namespace) -> int:
    with contextlib.suppress(ValueError):  # not the main thread: tests
        signal.signal(signal.SIGTERM, _stop)  # until the server has its own
    from quire.cli.commands import UsageError
    from quire.router.app import build_router, start_router
    from quire.router.replica import Role
    from quire.server.run import run as serve
    from quire.server.telemetry import log

    config = ServerConfig.create(**options_of(args, _SERVER_PREFIX))
    router = RouterConfig.create(**options_of(args, _ROUTER_PREFIX))
    if bool(args.prefill) != bool(args.decode):
        raise UsageError("--prefill and --decode go together: give servers for both")
    servers = [(url, role) for role, urls in ((Role.BOTH, args.replicas), (Role.PREFILL, args.prefill),
                                              (Role.DECODE, args.decode)) for url in urls]
    log.set_up(config.log_format, config.log_level)

    async def start() -> Any:
        return await start_router(router, servers)

    return serve(config, start, build=build_router)


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(0)
