"""An engine that dies again and again: the server ends, or goes on trying; who killed it is not tried a third time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.front.quarantine import QUARANTINE_SECONDS, Quarantine, content_of
from quire.errors import ConfigError, QuarantinedError
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.server.run import _listen, serve
from quire.server_config import ServerConfig
from tests.server.conftest import make_tokenizer
from tests.server.real import PATIENCE, ServeProcess, quire_serve, until
from tests.server.scripted import ScriptedEngine

DUMMY = ("--load-format", "dummy", "--executor", "dummy")


def _kill_next(server: ServeProcess, dead: int) -> int:
    """Kill the engine after the one with process id `dead`; its own id."""
    until(lambda: server.process.poll() is not None or server.engine_pid() not in (0, dead), PATIENCE)
    if server.process.poll() is not None:
        return 0
    pid = server.engine_pid()
    until(lambda: server.process.poll() is not None or server.http.get("/health").status_code == 200
          or server.engine_pid() != pid, PATIENCE)
    if server.process.poll() is None and server.engine_pid() == pid:
        os.kill(pid, signal.SIGKILL)
    return pid


def test_a_server_whose_engine_is_given_up_exits(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with quire_serve(tiny, log, *DUMMY, "--max-restarts", "1") as server:
        dead = 0
        for _ in range(2):
            dead = _kill_next(server, dead)
        assert server.process.wait(60) == 1
        assert b'"event": "engine_given_up"' in log.read_bytes()


def test_or_it_keeps_trying(tiny: Path, tmp_path: Path) -> None:
    with quire_serve(tiny, tmp_path / "log", *DUMMY, "--max-restarts", "0", "--keep-restarting") as server:
        dead = 0
        for _ in range(2):
            dead = _kill_next(server, dead)
        until(lambda: server.engine_pid() not in (0, dead) and server.http.get("/health").status_code == 200, PATIENCE)
        assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_who_was_there_twice_when_the_engine_died_is_not_tried_a_third_time(tiny: Path, tmp_path: Path) -> None:
    slow = {"prompt": "kill", "max_tokens": 1900, "ignore_eos": True}
    found: list[httpx.Response] = []

    def ask() -> None:
        found.append(httpx.post(f"{server.address}/v1/completions", json=slow, timeout=PATIENCE))

    with quire_serve(tiny, tmp_path / "log", *DUMMY, "--dummy-step-ms", "20") as server:
        for _ in range(2):
            thread = threading.Thread(target=ask)
            thread.start()
            until(lambda: server.metric("num_requests_running") == 1, PATIENCE)
            server.kill_engine()
            thread.join(PATIENCE)
            until(lambda: server.http.get("/health").status_code == 200, PATIENCE)
        assert [each.status_code for each in found] == [500, 500]
        ask()
        assert found[-1].status_code == 503 and found[-1].json()["error"]["code"] == "request_quarantined"
        assert int(found[-1].headers["retry-after"]) > 1
        other = server.http.post("/v1/completions", json={"prompt": "other", "max_tokens": 2})
        assert other.status_code == 200, "it concerns nobody else"


def _request(text: str, tenant: str = "", **params: Any) -> bytes:
    """The content of a request."""
    return content_of(Request("id", list(text.encode()), SamplingParams(**params), seed=time.monotonic_ns(),
                              arrival_time=time.monotonic(), tenant=tenant))


def test_quarantine_is_by_content_and_key_ends_and_is_lifted_by_success() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    quarantine.died_with([_request("a"), _request("b"), _request("c", max_tokens=3)])
    quarantine.check(_request("a"))
    quarantine.served(_request("b"))
    quarantine.died_with([_request("a"), _request("b"), _request("a", tenant="other")])
    with pytest.raises(QuarantinedError) as caught:
        quarantine.check(_request("a"))
    assert caught.value.retry_after == QUARANTINE_SECONDS
    with pytest.raises(QuarantinedError):
        quarantine.check(_request("a", seed=17))  # another seed makes no other request
    for innocent in (_request("b"), _request("a", tenant="other"), _request("a", max_tokens=4), _request("c")):
        quarantine.check(innocent)
    now[0] = QUARANTINE_SECONDS + 1
    quarantine.check(_request("a"))


def test_two_servers_that_choose_a_port_do_not_choose_the_same_and_a_port_taken_meanwhile_is_said() -> None:
    listeners = [_listen(ServerConfig.create(port=0)) for _ in range(200)]
    try:
        assert len({each.getsockname()[1] for each in listeners}) == 200
        assert not any(each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) for each in listeners)
    finally:
        for each in listeners:
            each.close()

    async def late() -> None:
        async def start() -> Any:
            # While the model was loaded another server has come to the port.
            other.bind(("127.0.0.1", port))
            other.listen()
            return ScriptedEngine(make_tokenizer())

        await serve(ServerConfig.create(port=port), start)

    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(ConfigError, match="cannot listen on"):
            asyncio.run(late())
