"""Real servers for the tests of the index: a redis-server, and the routes of an index behind Python's HTTP server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.kvcache.secret import derived_secret
from quire.kvpool.index import SIGNATURE, IndexRoutes, MemoryIndex

REDIS = shutil.which("redis-server")


class Redis:
    """A `redis-server` on a free port, without files."""

    def __init__(self) -> None:
        if REDIS is None:
            pytest.skip("there is no redis-server here (Debian: apt install redis-server)")
        pytest.importorskip("redis")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = int(listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        assert REDIS is not None
        self.process = subprocess.Popen(
            [REDIS, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < until, "redis-server does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def index_over_http(secret: bytes) -> Iterator[tuple[str, MemoryIndex]]:
    """What a router mounts: its address, and the index behind it."""
    index = MemoryIndex()
    routes = IndexRoutes(index, derived_secret(secret, "kv-index"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = routes.handle(self.path, body, self.headers.get(SIGNATURE))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
