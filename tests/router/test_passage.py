"""Requests on their way through a router: to whom, what of them is passed on, and what becomes of them on failures."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from quire.router.replica import State
from tests.router.fakes import FakeServer, chunk, fakes, routed, stream_head, whole
from tests.server.conftest import make_tokenizer
from tests.server.real import until
from tests.server.scripted import ScriptedEngine, running

STREAM = {"prompt": "x", "stream": True}
PLAIN = {"prompt": "x"}


def post(address: str, body: dict[str, Any], path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return httpx.post(address + path, json=body, timeout=60.0, **more)


def anonymous(text: str) -> str:
    """Without the ids and times of one request."""
    return re.sub(r"[0-9a-f]{16,}(-[0-9a-f]{8})?|1[0-9]{9}(\.[0-9]+)?", "*", text)


def breaks(*pieces: bytes) -> Any:
    """Says so much and hangs up."""
    async def say(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        return False

    return say


def refuses(status: str, code: str) -> Any:
    async def say(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(whole(json.dumps({"error": {"message": "no", "code": code}}).encode(), status))
        return True

    return say


def test_real_servers_answer_through_it_as_they_do_alone() -> None:
    one, two = ScriptedEngine(make_tokenizer()), ScriptedEngine(make_tokenizer())
    with running(one) as (first, _), running(two) as (second, _), routed([first, second]) as (address, service):
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", PLAIN),
                           ("/v1/responses", {"input": "hi"}), ("/v1/messages", {**chat, "max_tokens": 64}),
                           ("/tokenize", {"prompt": "abc"}), ("/detokenize", {"tokens": [60, 61]}),
                           ("/v1/messages/count_tokens", chat)):
            for extra in ({}, {"stream": True}):
                if extra and "token" in path.removeprefix("/v1"):
                    continue
                mine, its = post(address, {**body, **extra}, path), post(first, {**body, **extra}, path)
                assert mine.status_code == its.status_code == 200
                assert mine.headers["content-type"] == its.headers["content-type"]
                assert anonymous(mine.text) == anonymous(its.text)
        assert len(one.asked) and len(two.asked)
        assert {each.state for each in service.fleet} == {State.UP}
        # Whatever a server refuses, it refuses in its own words.
        for body in ({"prompt": "x", "nonsense": 1}, {"prompt": "x", "model": "other"}, {"prompt": ""}, [1]):
            mine, its = post(address, body), post(first, body)  # type: ignore[arg-type]
            assert (mine.status_code, mine.json()) == (its.status_code, its.json())
        assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "scripted"
        assert httpx.get(f"{address}/v1/models/scripted").json()["id"] == "scripted"
        assert httpx.get(f"{address}/v1/models/other").status_code == 404
        assert httpx.get(f"{address}/health").json()["servers_up"] == 2
        assert "/v1/router/servers" in httpx.get(f"{address}/openapi.json").json()["paths"]
        assert httpx.get(f"{address}/docs").status_code == 200
        assert b"quire:router_server_up" in httpx.get(f"{address}/metrics").content


def test_requests_go_round() -> None:
    servers = [FakeServer() for _ in range(3)]
    with fakes(*servers) as urls, routed(urls) as (address, _):
        replies = [post(address, PLAIN if turn % 2 else STREAM) for turn in range(9)]
        assert [reply.status_code for reply in replies] == [200] * 9
        assert [len(server.asked) for server in servers] == [3, 3, 3]
        assert {reply.headers["x-quire-replica"] for reply in replies} == {"0", "1", "2"}


@pytest.mark.parametrize("body", [PLAIN, STREAM])
@pytest.mark.parametrize("say", [
    breaks(), breaks(b"HTTP/1.1 200 OK\r\n"), breaks(b"nonsense\r\n\r\n"), breaks(stream_head()),
    breaks(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf of it"),
    refuses("503 Service Unavailable", "closing"), refuses("500 Internal Server Error", "engine_dead"),
    refuses("429 Too Many Requests", "queue_full"),
])
def test_a_request_that_has_sent_nothing_is_tried_elsewhere(say: Any, body: dict[str, Any]) -> None:
    bad, good = FakeServer(say), FakeServer()
    with fakes(bad, good) as urls, routed(urls, health_interval=60.0) as (address, service):
        replies = [post(address, body) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200] * 4
        assert all(b"a" in reply.content for reply in replies)
        if b"429" not in str(bad.say.__closure__).encode() and service.metrics.retries == 1:
            assert len(bad.asked) == 1  # nobody else was sent there
        assert len(good.asked) == 4


def test_nobody_is_sent_to_a_dead_server_twice() -> None:
    bad, good = FakeServer(breaks()), FakeServer()
    with fakes(bad, good) as urls, routed(urls, health_interval=60.0) as (address, service):
        assert [post(address, PLAIN).status_code for _ in range(20)] == [200] * 20
        assert len(bad.asked) == 1
        assert service.metrics.retries == 1


def test_a_server_comes_back_when_it_is_well() -> None:
    bad, good = FakeServer(breaks()), FakeServer()
    with fakes(bad, good) as urls, routed(urls) as (address, service):
        assert post(address, PLAIN).status_code == 200
        bad.say = bad.hello
        until(lambda: [each.available for each in service.fleet] == [True, True])
        count = len(bad.asked)
        assert [post(address, PLAIN).status_code for _ in range(4)] == [200] * 4
        assert len(bad.asked) == count + 2


@pytest.mark.parametrize(("path", "form"), [
    ("/v1/completions", b'data: {"error"'), ("/v1/chat/completions", b'data: {"error"'),
    ("/v1/messages", b"event: error\ndata: "), ("/v1/responses", b"event: error\ndata: ")])
def test_a_stream_that_breaks_ends_with_an_error_between_whole_events(path: str, form: bytes) -> None:
    begun = stream_head() + chunk(b'data: {"text":"a"}\n\n') + chunk(b'data: {"text":"b"}\n\ndata: {"te')
    bad, good = FakeServer(breaks(begun)), FakeServer()
    with fakes(bad, good) as urls, routed(urls) as (address, service):
        reply = post(address, STREAM, path)
        assert reply.status_code == 200
        start, middle, end = reply.content.partition(b'data: {"text":"b"}\n\n')
        assert start == b'data: {"text":"a"}\n\n' and middle
        assert end.startswith(form) and b"has gone" in end and end.endswith(b"\n\n")
        assert not good.asked and service.metrics.broken_streams == 1


def test_when_all_refuse_the_client_hears_what_the_last_one_said() -> None:
    servers = [FakeServer(refuses("429 Too Many Requests", "queue_full")) for _ in range(3)]
    with fakes(*servers) as urls, routed(urls) as (address, _):
        reply = post(address, PLAIN)
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "queue_full"
        assert [len(server.asked) for server in servers] == [1, 1, 1]


def test_a_request_that_kills_servers_does_not_kill_them_all() -> None:
    servers = [FakeServer(breaks()) for _ in range(6)]
    with fakes(*servers) as urls, routed(urls, health_interval=60.0, max_retries=2) as (address, _):
        reply = post(address, PLAIN)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "too_many_failures"
        assert sum(len(server.asked) for server in servers) == 3
        # And asking again is of no use, while others are served.
        assert post(address, PLAIN).json()["error"]["code"] == "request_quarantined"
        assert sum(len(server.asked) for server in servers) == 3
        servers[5].say = servers[5].hello
        assert post(address, {"prompt": "another"}).status_code in (200, 503)


def test_an_error_of_the_request_itself_is_not_tried_elsewhere() -> None:
    servers = [FakeServer(refuses("503 Service Unavailable", "request_quarantined")) for _ in range(2)]
    with fakes(*servers) as urls, routed(urls) as (address, _):
        assert post(address, PLAIN).json()["error"]["code"] == "request_quarantined"
        assert sum(len(server.asked) for server in servers) == 1


def test_a_server_that_closes_gets_nothing_new_and_finishes_what_it_has() -> None:
    release = threading.Event()

    async def slow(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(stream_head() + chunk(b"data: 1\n\n"))
        while not release.is_set():
            await asyncio.sleep(0.01)
        writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))
        return True

    closing, other = FakeServer(slow), FakeServer()
    with fakes(closing, other) as urls, routed(urls) as (address, service):
        found: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: found.append(post(address, STREAM)))
        thread.start()
        until(lambda: closing.asked)
        closing.health = whole(json.dumps({"error": {"code": "closing", "message": "bye"}}).encode(), "503 X")
        until(lambda: next(iter(service.fleet)).state is State.DRAINING)
        assert [post(address, PLAIN).status_code for _ in range(4)] == [200] * 4
        release.set()
        thread.join(60)
        assert found[0].text.endswith("data: [DONE]\n\n")
        assert len(closing.asked) == 1 and len(other.asked) == 4


def test_a_server_that_hangs_is_left_and_its_requests_go_elsewhere() -> None:
    async def hang(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        await asyncio.Event().wait()
        return True

    stuck, good = FakeServer(hang), FakeServer()
    with fakes(stuck, good) as urls, routed(urls, health_timeout=0.3) as (address, service):
        stuck.health = b""  # it takes connections and says nothing
        reply = post(address, PLAIN)
        assert reply.status_code == 200 and len(good.asked) == 1
        assert next(iter(service.fleet)).state is State.DOWN


def test_what_is_passed_on_and_what_is_not() -> None:
    server = FakeServer()
    with fakes(server) as urls, routed(urls) as (address, _):
        refused = post(address, PLAIN, headers={"x-quire-prefill": "http://evil"})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "prefill_not_allowed"
        post(address, PLAIN, headers={"x-quire-anything": "else", "authorization": "Bearer secret-key",
                                      "cookie": "c", "x-request-id": "mine", "traceparent": "00-1-2-01"})
        path, headers, body = server.asked[0]
        assert path == "/v1/completions" and json.loads(body) == PLAIN
        assert headers["authorization"] == "Bearer secret-key" and headers["x-request-id"] == "mine"
        assert "x-quire-anything" not in headers and "cookie" not in headers and headers["traceparent"] == "00-1-2-01"
        assert headers["host"] == urls[0].removeprefix("http://")


def test_keys_hosts_and_bodies_are_checked_as_a_server_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice alice-key-123\n")
    server = FakeServer()
    limits = {"api_key_file": str(file), "max_body_size": 1000}
    with fakes(server) as urls, routed(urls, server=limits) as (address, _):
        assert post(address, PLAIN).status_code == 401
        assert httpx.get(f"{address}/v1/router/servers").status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        key = {"authorization": "Bearer alice-key-123"}
        assert post(address, PLAIN, headers=key).status_code == 200
        assert post(address, {"prompt": "x" * 2000}, headers=key).status_code == 413
        assert httpx.post(f"{address}/v1/completions", content=b"{}", headers=key).status_code == 415
        assert post(address, PLAIN, "/v1/nothing", headers=key).status_code == 404
        assert httpx.get(f"{address}/v1/completions", headers=key).status_code == 405
        assert len(server.asked) == 1
    with fakes(server) as urls, routed(urls) as (address, _):
        assert post(address, PLAIN, headers={"host": "evil.example"}).status_code == 403


def test_a_response_is_asked_of_the_server_that_stored_it() -> None:
    engines = [ScriptedEngine(make_tokenizer()) for _ in range(3)]
    with running(engines[0]) as (a, _), running(engines[1]) as (b, _), running(engines[2]) as (c, _), \
            routed([a, b, c]) as (address, _service):
        for extra in ({}, {"stream": True}):
            reply = post(address, {"input": "hello", **extra}, "/v1/responses")
            text = reply.text
            name = text[text.index('"id":"resp') + 6:].split('"')[0]
            for _ in range(3):
                assert httpx.get(f"{address}/v1/responses/{name}").json()["id"] == name
                next_one = post(address, {"input": "and?", "previous_response_id": name}, "/v1/responses")
                assert next_one.status_code == 200, next_one.text
        assert httpx.get(f"{address}/v1/responses/resp_unknown").status_code == 404
        with routed([a, b, c]) as (another, _service):  # a router that has not seen it being made
            assert httpx.get(f"{another}/v1/responses/{name}").json()["id"] == name
            assert httpx.delete(f"{another}/v1/responses/{name}").json()["deleted"]
            assert httpx.get(f"{address}/v1/responses/{name}").status_code == 404


def test_no_server_at_all_is_said_clearly() -> None:
    with routed([]) as (address, _):
        reply = post(address, PLAIN)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "no_server"
        assert httpx.get(f"{address}/health").status_code == 503
        assert "retry-after" in reply.headers


def test_a_client_that_leaves_ends_its_request_at_the_server() -> None:
    engine = ScriptedEngine(make_tokenizer(), "x" * 4000)
    engine.delay = 0.005
    with running(engine) as (url, _), routed([url]) as (address, service):
        with httpx.stream("POST", f"{address}/v1/completions", json={**STREAM, "max_tokens": 3000}) as reply:
            next(reply.iter_bytes())
        until(lambda: engine.aborted and not engine.running)
        until(lambda: not service.active and next(iter(service.fleet)).load.in_flight == 0)


def test_waiting_places_are_shared_fairly(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice alice-key-123\nbob bob-key-12345\n")
    release = threading.Event()

    async def slow(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        while not release.is_set():
            await asyncio.sleep(0.01)
        writer.write(whole(b'{"text":"a"}'))
        return True

    server = FakeServer(slow)
    with fakes(server) as urls, \
            routed(urls, server={"api_key_file": str(file)}, max_waiting_requests=4) as (address, service):
        found: dict[str, list[int]] = {"alice-key-123": [], "bob-key-12345": []}

        def ask(key: str) -> None:
            reply = post(address, PLAIN, headers={"authorization": f"Bearer {key}"})
            found[key].append(reply.status_code)

        threads = []
        for key, count in (("alice-key-123", 4), ("bob-key-12345", 1)):
            for _ in range(count):
                threads.append(threading.Thread(target=ask, args=(key,)))
                threads[-1].start()
            until(lambda: len(server.asked) >= len(threads))
        until(lambda: 429 in found["alice-key-123"])
        release.set()
        for thread in threads:
            thread.join(60)
        assert sorted(found["alice-key-123"]) == [200, 200, 200, 429] and found["bob-key-12345"] == [200]
        until(lambda: not service.active)


@pytest.mark.parametrize("name", ["a%20HTTP/1.1%0d%0aHost:x%0d%0a%0d%0aGET%20/evil", "a%0d%0aX-Evil:%20y", "a%20b",
                                  "%E2%82%AC", "a%00b", "x%3Fq=1", "..%2f..%2fmetrics", ".."])
def test_nothing_in_a_path_becomes_a_request_of_its_own(name: str) -> None:
    server = FakeServer()
    with fakes(server) as servers, routed(servers) as (address, _):
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(f"GET /v1/responses/{name} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            status = client.makefile("rb").readline().split()[1]
        for path, headers, _ in server.asked:
            assert path.count("/") == 3 and path.startswith("/v1/responses/") and "evil" not in headers.get("host", "")
            assert unquote(path) == f"/v1/responses/{unquote(name)}" and "x-evil" not in headers
        assert status == (b"404" if not server.asked else b"200") and len(server.asked) <= 1


@pytest.mark.parametrize("half", [b'data: {"te', b"data:"])
def test_half_of_the_first_event_is_no_token(half: bytes) -> None:
    dies = FakeServer(breaks(stream_head() + chunk(half)))
    with fakes(dies, FakeServer()) as servers, routed(servers) as (address, _):
        for _ in range(2):
            answer = post(address, STREAM)
            assert answer.status_code == 200 and answer.text == 'data: {"text":"a"}\n\ndata: [DONE]\n\n'


def test_many_of_one_content_at_a_server_that_dies_are_not_to_blame() -> None:
    """One failure that six equal requests saw is one, so the seventh is not refused while they are tried elsewhere."""
    there, go = [], threading.Event()

    async def dies(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        there.append(writer)
        while len(there) < 6:
            await asyncio.sleep(0.01)
        return False

    async def waits(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        while not go.is_set():
            await asyncio.sleep(0.01)
        writer.write(whole(b'{"text":"a"}'))
        return True

    bad, good = FakeServer(dies), FakeServer(waits)
    with fakes(bad, good) as servers, routed(servers) as (address, _), ThreadPoolExecutor(16) as pool:
        first = [pool.submit(post, address, PLAIN) for _ in range(12)]
        until(lambda: len(good.asked) == 12)
        last = pool.submit(post, address, PLAIN)
        until(lambda: len(good.asked) == 13 or last.done())
        go.set()
        assert [each.result().status_code for each in (*first, last)] == [200] * 13
