"""`quire serve` when things go wrong: an engine that is killed, clients that leave, a signal to end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.real import PATIENCE, ROOT, ServeProcess, quire_serve, until


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    with quire_serve(tiny, log, "--load-format", "dummy", "--drain-timeout", "60") as found:
        yield found


def stream_long(server: ServeProcess, found: list[Any], tokens: int = 1500) -> None:
    body = {"prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=server.address, timeout=PATIENCE) as client:
        found.append((client.post("/v1/completions", json=body).text, time.monotonic()))


def test_a_killed_engine_fails_what_runs_at_once_and_comes_back(server: ServeProcess) -> None:
    found: list[Any] = []
    whole: list[Any] = []
    threads = [threading.Thread(target=stream_long, args=(server, found)) for _ in range(3)]
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    threads.append(threading.Thread(target=lambda: whole.append(server.http.post("/v1/completions", json=body))))
    for thread in threads:
        thread.start()
    until(lambda: server.metric("num_requests_running") >= 4)
    killed = time.monotonic()
    server.kill_engine()
    for thread in threads:
        thread.join(PATIENCE)
    for text, ended in found:
        last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_dead" and ended - killed < 60.0
    assert whole[0].status_code == 500 and whole[0].json()["error"]["code"] == "engine_dead"
    health = server.http.get("/health")
    assert health.status_code == 503, health.text
    refused = server.http.post("/v1/completions", json={"prompt": "x"})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    until(lambda: server.http.get("/health").status_code == 200, PATIENCE)
    assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    assert server.metric("engine_restarts_total") == 1


def test_a_disconnected_client_s_blocks_are_freed(server: ServeProcess) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "y" * 200, "max_tokens": 1500, "stream": True, "ignore_eos": True}).encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                       b"content-length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: server.metric("kv_blocks_used") > 12)
    until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_blocks_used") == 0


def test_sigterm_lets_streams_finish_and_exits_with_0(server: ServeProcess) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=stream_long, args=(server, found, 1000))
    thread.start()
    until(lambda: server.metric("num_requests_running") == 1)
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGTERM)
    until(lambda: b'"event": "draining"' in server.log.read_bytes())
    late = server.http.post("/v1/completions", json={"prompt": "x"})
    assert late.status_code == 503 and late.json()["error"]["code"] == "closing"
    thread.join(PATIENCE)
    assert found[0][0].rstrip().endswith("[DONE]") and '"finish_reason":"length"' in found[0][0]
    assert server.process.wait(30) == 0
    assert server.engine_gone(engine)
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert any(line["event"] == "request" and line.get("request_id") for line in lines)


def test_sigterm_while_the_server_is_still_being_imported_exits_with_0() -> None:
    code = """if True:
        import os, signal, sys

        class Stop:
            def find_spec(self, name, path=None, target=None):
                if name == "quire.server.run":
                    os.kill(os.getpid(), signal.SIGTERM)

        sys.meta_path.insert(0, Stop())
        from quire.cli.main import main
        sys.exit(main(["serve", "--port", "0", "--executor", "dummy"]))
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    ended = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, env={**os.environ, "PYTHONPATH": path})
    assert ended.returncode == 0
