"""A hub on localhost that speaks as much of the protocol as a download needs, and can drop connections."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves one repository, org/name."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.status = 200
        self.cut_after: int | None = None
        self.requests: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if self.server.status != 200:
            self._reply(self.server.status, b"{}")
        elif path.startswith("/api/models/org/name/tree/"):
            self._json(
                [
                    {"type": "file", "path": n, "size": len(b), "oid": "0"}
                    for n, b in self.server.files.items()
                ]
            )
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": "org/name", "sha": COMMIT, "siblings": siblings})
        elif path.startswith(("/org/name/resolve/main/", f"/org/name/resolve/{COMMIT}/")):
            self._file(path.split("/", 5)[5])
        else:
            self._reply(404, b"{}")

    def _file(self, name: str) -> None:
        body = self.server.files.get(name)
        if body is None:
            return self._reply(404, b"{}")
        headers = {
            "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted, start = self.headers.get("Range"), 0
        if wanted:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        if self.command == "GET" and self.server.cut_after is not None and len(body) > self.server.cut_after:
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(body) - start))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body[start : start + self.server.cut_after])
            return None
        return self._reply(206 if wanted else 200, body[start:], headers)


@contextmanager
def fake_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    with FakeHub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
