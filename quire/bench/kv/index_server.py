"""The index of a pool behind an HTTP port of this process: what a router mounts, for benchmarks without one."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from quire.kvcache.secret import derived_secret
from quire.kvpool.index import SIGNATURE, IndexRoutes, MemoryIndex


def serve_index(secret: bytes, index: MemoryIndex | None = None) -> tuple[str, Callable[[], None]]:
    """The address of an index (a new one if none is given), and what stops it."""
    routes = IndexRoutes(index or MemoryIndex(), derived_secret(secret, "kv-index"))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

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
    Thread(target=server.serve_forever, name="quire-bench-index", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return f"http://127.0.0.1:{server.server_address[1]}", stop
