"""Clients that mean harm, at the level of HTTP: endless headers, smuggling, foreign names, paths without a key."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.telemetry.log import LOGGER, JsonLines, TextLines
from tests.server.conftest import Serve, Served
from tests.server.real import quire_serve, until


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def answer_to(address: str, data: bytes) -> tuple[int, dict[str, str]]:
    """(status, error) of the first answer to these bytes."""
    with connect(address) as client:
        client.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body).get("error", {})


def push(address: str, start: bytes, most: int = 64 << 20, piece: bytes = b"a" * 65536) -> tuple[int, bytes]:
    """Send `start`, and then bytes without an end: (how many were taken, what was answered)."""
    sent = 0
    with connect(address) as client:
        client.sendall(start)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < most:
                sent += client.send(piece)
        found = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while data := client.recv(65536):
                found += data
    return sent, found


@pytest.mark.parametrize("start", [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX", b"GET /",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;",
], ids=["value", "name", "path", "trailer", "chunk extension"])
def test_a_header_that_never_ends_is_refused_while_it_comes(server: Served, start: bytes) -> None:
    sent, answered = push(server.address, start)
    assert sent < 16 << 20, "it was read on and on"
    if b"\r\n\r\n" not in start:
        assert answered.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answered
    assert server.http.get("/health").status_code == 200


def test_endless_headers_of_several_clients_cost_no_memory(tiny: Path, tmp_path: Path) -> None:
    with quire_serve(tiny, tmp_path / "log", "--load-format", "dummy") as server:
        server.http.get("/health")
        before = server.memory()
        for _ in range(8):
            push(server.address, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert server.memory() - before < 64 << 20
        assert server.http.get("/health").status_code == 200


def test_large_bodies_and_many_headers_within_the_limits_still_come_through(server: Served) -> None:
    headers = {f"x-{number}": "v" * 500 for number in range(100)}
    found = server.http.post("/tokenize", json={"prompt": "ab" * 200_000}, headers=headers)
    assert found.status_code == 200 and found.json()["count"] == 400_000

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(3000):
            yield b"x" * 100
        yield b'"}'

    chunked = server.http.post("/tokenize", content=pieces(), headers={"content-type": "application/json"})
    assert chunked.json()["count"] == 300_000


@pytest.mark.parametrize(("headers", "status", "code"), [
    (b"Host: localhost\r\nTransfer-Encoding: gzip, chunked\r\n", 501, "unsupported_transfer_encoding"),
    (b"Host: localhost\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 501, None),
    (b"Host: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n", None, None),
    (b"Transfer-Encoding: chunked\r\n", 400, "invalid_host"),
    (b"Host: localhost\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n", 400, "invalid_host"),
])
def test_what_two_servers_may_read_differently_is_refused(server: Served, headers: bytes, status: int | None,
                                                          code: str | None) -> None:
    data = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n" + headers + b"\r\n0\r\n\r\n"
    found, error = answer_to(server.address, data)
    assert found in ((400, 501) if status is None else (400, status)) and error["code"] not in ("invalid_json", None)
    assert code is None or (found, error["code"]) == (status, code)


def test_two_keys_in_one_request_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "first-key-1,second-key-2")
    server = serve()
    for words in (("first-key-1", "second-key-2"), ("wrong", "first-key-1"), ("first-key-1", "first-key-1")):
        lines = "".join(f"Authorization: Bearer {word}\r\n" for word in words)
        found, error = answer_to(server.address, f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                                                 f"{lines}\r\n".encode())
        assert (found, error["code"]) == (400, "several_authorizations")


def test_a_key_after_the_body_is_none(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "first-key-1")
    found, error = answer_to(serve().address, (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nAuthorization: Bearer first-key-1\r\n\r\n"))
    assert (found, error["code"]) == (401, "invalid_api_key")


def test_a_url_may_name_no_other_server_than_the_host(server: Served) -> None:
    for name, status in (("localhost", 200), ("evil.example", 400)):
        found, _ = answer_to(server.address, f"GET http://{name}/health HTTP/1.1\r\nHost: localhost\r\n"
                                             "Connection: close\r\n\r\n".encode())
        assert found == status


def test_thousands_of_requests_in_one_read_are_not_kept(server: Served) -> None:
    one = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(server.address) as client:
        client.sendall(one * 4)
        found = b""
        while found.count(b'{"status":"ok"}') < 4:
            found += client.recv(65536)
    _, found = push(server.address, one, most=1 << 20, piece=one * 5000)
    assert found.count(b'{"status":"ok"}') < 5000  # 25,000 before


def test_without_a_key_nobody_learns_which_paths_there_are(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "first-key-1")
    server = serve()
    right = {"authorization": "Bearer first-key-1"}
    for method, path, status in (("GET", "/nothing", 404), ("DELETE", "/v1/models", 405), ("POST", "/health", 405),
                                 ("GET", "/v1/chat/completions", 405)):
        found = server.http.request(method, path)
        assert found.status_code == 401 and "allow" not in found.headers
        assert server.http.request(method, path, headers=right).status_code == status
    assert server.http.get("/health").status_code == server.http.head("/health").status_code == 200


@pytest.mark.parametrize(("host", "allowed"), [
    ("localhost", True), ("127.0.0.1:8000", True), ("[::1]:80", True), ("LocalHost:1", True), ("a.localhost", True),
    ("evil.example", False), ("evil.example:8000", False), ("127.0.0.1.evil.example", False), ("10.0.0.1", False),
    ("localhost.evil.example", False), ("", False), ("[::1].evil.example", False), ("[::1]evil.example:80", False),
    ("127.0.0.1:80@evil.example", False), ("evil.example#.localhost", False),
])
def test_a_server_without_keys_answers_to_loopback_names_only(server: Served, host: str, allowed: bool) -> None:
    for path in ("/health", "/v1/models", "/"):
        found = server.http.get(path, headers={"host": host})
        assert found.status_code == (200 if allowed else 403)
        assert allowed or found.json()["error"]["code"] == "host_not_allowed"


def test_other_names_are_allowed_by_an_option_or_where_a_key_is_needed(
        serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(server: Served, host: str) -> int:
        return server.http.get("/health", headers={"host": host}).status_code

    named = serve(allowed_hosts="models.example, other.example")
    assert [status(named, host) for host in ("models.example:80", "localhost", "x.example")] == [200, 200, 403]
    assert status(serve(allowed_hosts="*"), "x.example") == 200
    monkeypatch.setenv("QUIRE_API_KEYS", "first-key-1")
    assert status(serve(), "x.example") == 200
    assert status(serve(allowed_hosts="models.example"), "x.example") == 403


def test_template_variables_of_any_name_are_used_or_refused(server: Served) -> None:
    for name in ("self", "cls", "messages", "environment", "loop", "range", "context", "namespace", "lambda", "args",
                 "kwargs", "caller", "varargs", "add_generation_prompt", "super", "__class__"):
        found = server.chat(chat_template_kwargs={name: 1})
        assert found.status_code in (200, 400), (name, found.text)
        assert found.status_code == 200 or found.json()["error"]["param"] in ("chat_template_kwargs", "messages")
    assert server.chat(chat_template_kwargs={"self": 1}).status_code == 400


@pytest.mark.parametrize("form", [TextLines(), JsonLines()], ids=["text", "json"])
def test_the_log_shows_control_characters_and_does_not_send_them(form: logging.Formatter) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(form)
    logger = logging.getLogger("quire.test_hostile")
    logger.propagate = False
    logger.addHandler(handler)
    bad = "/\x1b[2Ja\rb\x07\x9b31m\u202e\u2028\x7f\nc d"
    try:
        raise ValueError(bad)
    except ValueError:
        logger.error("request %s", bad, exc_info=True, extra={"fields": {"path": bad, "plain": "/v1/models"}})
    logger.removeHandler(handler)
    found = written.getvalue()
    assert all(char == "\n" or char.isprintable() for char in found)
    assert "\\u001b[2J" in found and "/v1/models" in found
    if isinstance(form, JsonLines):
        assert json.loads(found)["path"] == bad


def test_the_path_of_a_request_is_logged_in_escapes(server: Served) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(TextLines())
    before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        server.http.get("/%1b%5d0;owned%07%0dGET")
        until(lambda: "owned" in written.getvalue())
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)
    assert all(char == "\n" or char.isprintable() for char in written.getvalue())


def test_signals_that_mean_nothing_end_neither_process(tiny: Path, tmp_path: Path) -> None:
    with quire_serve(tiny, tmp_path / "log", "--load-format", "dummy", "--executor", "dummy") as server:
        engine = server.engine_pid()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(engine, number)
            os.kill(server.process.pid, number)
        time.sleep(0.5)
        assert server.engine_pid() == engine
        assert server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


class _Frames:
    """A stream of events that somebody reads on a socket of his own."""

    def __init__(self, server: Served, key: str, path: str, body: dict[str, Any] | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.socket = connect(server.address)
        self.socket.sendall(f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
                            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
                            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        self.status = int(self.socket.recv(16).split(b" ")[1])

    def ended(self, seconds: float = 60.0) -> bool:
        self.socket.settimeout(seconds)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while self.socket.recv(1 << 20):
                pass
            return True
        return False


@pytest.mark.parametrize(("path", "body", "number"), [
    ("/v1/engine/events", None, 16), ("/v1/engine/scenarios", {"scenario": "long-prompt", "speed": 0.1}, 4),
], ids=["watchers", "scenarios"])
def test_one_key_cannot_hold_all_places_of_the_page(serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str,
                                                    body: dict[str, Any] | None, number: int) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "greedy-key-1,modest-key-2")
    server = serve()
    server.engine.watch = lambda seconds, fresh=False: None  # type: ignore[attr-defined]
    greedy = [_Frames(server, "greedy-key-1", path, body) for _ in range(number)]
    assert all(each.status == 200 for each in greedy)
    assert _Frames(server, "greedy-key-1", path, body).status == 429
    modest = _Frames(server, "modest-key-2", path, body)
    assert modest.status == 200
    assert greedy[-1].ended(), "the newest of the key that has most gives up its place"
    others = [_Frames(server, "modest-key-2", path, body) for _ in range(number)]
    served = [each for each in others if each.status == 200]
    assert len(served) == number // 2 - 1, "it gets no more than its share"
    for each in (*greedy, modest, *others):
        each.socket.close()



def test_a_body_in_very_many_small_chunks_ends_the_connection_and_in_ordinary_ones_it_is_read(server: Served) -> None:
    start = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
             b"Transfer-Encoding: chunked\r\n\r\n")
    body = json.dumps({"prompt": "x" * 3000}).encode()

    def chunks(size: int, text: bytes) -> bytes:
        pieces = [text[place : place + size] for place in range(0, len(text), size)]
        return start + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    assert answer_to(server.address, chunks(4, body))[0] == 200
    sent, answered = push(server.address, start, 4 << 20, b"1\r\n \r\n" * 10_000)
    assert sent < 4 << 20 and not answered.startswith(b"HTTP/1.1 2"), "it was read on and on"
    assert server.http.get("/health").status_code == 200
