"""The server's life: bind, start the engine, serve, and on SIGTERM finish what runs and end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from quire.errors import ConfigError
from quire.server.access.auth import ApiKeys
from quire.server.access.connection import bounded_protocol
from quire.server.access.hosts import is_loopback
from quire.server.app import App, build_app, with_cors
from quire.server.telemetry.log import event
from quire.server.telemetry.tracing import Tracing
from quire.server_config import ServerConfig

_BACKLOG = 2048
_ARENA_MAX, _MMAP_THRESHOLD = -8, -3
"""Numbers of glibc's `mallopt`."""
StartEngine = Callable[[], Coroutine[Any, Any, Any]]
Ready = Callable[[str, App], None]
BuildApp = Callable[..., App]
"""Makes the application around what was started, as `build_app` does."""


def run(config: ServerConfig, start_engine: StartEngine, *, build: BuildApp = build_app,
        ready: Ready | None = None) -> int:
    """Serve until told to stop; the exit code."""
    import uvloop

    _give_memory_back()

    async def start() -> Any:
        engine = await start_engine()
        gc.collect()
        gc.freeze()  # else each full collection searches all that was imported, for a tenth of a second
        return engine

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, start, ready, build=build))


def _give_memory_back() -> None:
    """Keep malloc from growing over days. By itself glibc gives every thread a heap of its own, and raises the size
    from which a freed block goes back to the system to the largest it has seen: long prompts leave holes then."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 2)
        mallopt(_MMAP_THRESHOLD, 128 << 10)


async def serve(config: ServerConfig, start_engine: StartEngine, ready: Ready | None = None,
                stops: Stops | None = None, build: BuildApp = build_app) -> int:
    """`ready` is told the address when requests are taken; `stops` says when to end, beside the signals."""
    began = time.monotonic()
    keys, tracing = ApiKeys.of(config), Tracing.to(config.otlp_endpoint)
    listener = _listen(config)
    _warn_if_public(config, keys)
    stops = Stops() if stops is None else stops
    stops.listen()
    try:
        engine = await stops.unless_stopped(start_engine())
        if engine is None:
            return 0
        app = build(engine, config, keys=keys, tracing=tracing)
        try:
            address = _address(listener)
            try:
                listener.listen(_BACKLOG)  # who reads that it is ready may connect at once
            except OSError as error:  # another process has begun to listen there meanwhile
                raise _cannot_listen(config, error) from error
            event(logging.INFO, "ready", url=address, model=app.service.model_name, api_keys=len(keys),
                  seconds=round(time.monotonic() - began, 2))
            if ready is not None:
                ready(address, app)
            app.service.metrics.loop_lag.start()
            given_up = await _serve_until_stopped(app, config, listener, stops)
        finally:
            app.service.close()
            await engine.shutdown()
            tracing.close()
    finally:
        listener.close()
        stops.ignore()
    event(logging.INFO, "stopped")
    return 1 if given_up else 0


async def _serve_until_stopped(app: App, config: ServerConfig, listener: socket.socket, stops: Stops) -> bool:
    """Whether it ended because the engine failed for good, for the exit code."""
    _allow_many_files(config.max_connections)
    server = _Server(uvicorn.Config(
        with_cors(app, config.allowed_origins), http=bounded_protocol(config), ws="none", lifespan="off",
        log_config=None, access_log=False, server_header=False, date_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=3, backlog=_BACKLOG))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopped = asyncio.create_task(stops.first.wait())
    given_up = asyncio.create_task(app.service.engine.given_up())
    await asyncio.wait([serving, stopped, given_up], return_when=asyncio.FIRST_COMPLETED)
    hopeless = given_up.done()
    for task in (stopped, given_up):
        task.cancel()
    if hopeless:
        event(logging.CRITICAL, "engine_given_up", advice="it died too often in a row: see what it said before; "
                                                          "--keep-restarting tries for ever")
    if not serving.done():
        draining = asyncio.create_task(app.drain(config.drain_timeout))
        hurry = asyncio.create_task(stops.second.wait())
        await asyncio.wait([draining, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            await app.drain(0.0)
        for task in (draining, hurry):
            task.cancel()
        server.should_exit = True
    await serving
    return hopeless


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which end the process by the signal again after a clean end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Stops:
    """SIGTERM and Ctrl-C: the first asks to finish, the second to hurry."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def listen(self) -> None:
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not the main thread: tests
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
            for number in (signal.SIGUSR1, signal.SIGUSR2):  # they mean nothing here, and would end the process
                signal.signal(number, signal.SIG_IGN)

    def ignore(self) -> None:
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)

    def stop(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def unless_stopped(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`; None where a signal came first."""
        task, stopped = asyncio.create_task(work), asyncio.create_task(self.first.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            engine = await task
            await engine.shutdown()
        return None


def _listen(config: ServerConfig) -> socket.socket:
    """Bound before the model is loaded, so that a port in use fails at once."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
        if config.port:
            # For a port of its choice the kernel would take one that another server is bound to and loads a model for.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise _cannot_listen(config, error) from error
    listener.set_inheritable(False)
    return listener


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose another "
                       "with --port", field="port")


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_if_public(config: ServerConfig, keys: ApiKeys) -> None:
    if len(keys) or is_loopback(config.host):
        return
    text = (f"WARNING: {config.host} can be reached from other machines and no API key is set: anybody there may use "
            f"this model. Set QUIRE_API_KEYS or --api-key-file.")
    event(logging.WARNING, "public_without_key", host=config.host, advice=text)
    if sys.stderr.isatty():
        print(f"\n{'!' * len(text)}\n{text}\n{'!' * len(text)}\n", file=sys.stderr, flush=True)


def _allow_many_files(connections: int) -> None:
    """Each connection is an open file; many systems allow 1,024 until asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
