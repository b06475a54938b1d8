"""Real servers for the tests of the index: a redis-server, and the routes of an index behind Python's HTTP server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.bench.kv.index_server import serve_index
from quire.kvpool.index import MemoryIndex

REDIS = shutil.which("redis-server")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Listening:
    """A program that listens on a port of its own; it can be killed and started anew."""

    def __init__(self, port: int, command: list[str]) -> None:
        self.port = port
        self._command = command
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < until, f"{self._command[0]} does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Redis(Listening):
    """A `redis-server` on a free port, without files."""

    def __init__(self) -> None:
        if REDIS is None:
            pytest.skip("there is no redis-server here (Debian: apt install redis-server)")
        pytest.importorskip("redis")
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        super().__init__(port, [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])


@contextmanager
def index_over_http(secret: bytes) -> Iterator[tuple[str, MemoryIndex]]:
    """What a router mounts: its address, and the index behind it."""
    index = MemoryIndex()
    url, stop = serve_index(secret, index)
    try:
        yield url, index
    finally:
        stop()
