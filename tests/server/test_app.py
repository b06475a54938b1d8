"""Routes, keys, limits and faults of the server itself, around an engine that is written beforehand."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError, RequestTimeoutError
from quire.server.access.auth import ApiKeys
from quire.server.routes import ROUTES
from quire.server.service import salt_of
from quire.server.telemetry.log import JsonLines
from quire.server_config import ServerConfig
from tests.server.conftest import Serve, Served, make_tokenizer
from tests.server.scripted import ScriptedEngine

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def test_every_route_answers(server: Served) -> None:
    get = server.http.get
    assert get("/health").json() == {"status": "ok"}
    assert get("/version").json()["version"]
    card = get("/v1/models").json()["data"][0]
    assert card["id"] == "scripted" and get("/v1/models/scripted").json() == card
    assert get("/v1/models/other").status_code == 404
    assert get("/openapi.json").json()["openapi"] == "3.1.0"
    assert "quire:num_requests_running" in get("/metrics").text
    page = get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text and "https://" not in page.text  # nothing is fetched from anywhere
    assert server.http.head("/health").status_code == 200


def test_text_and_tokens_go_both_ways(server: Served) -> None:
    post = server.http.post
    found = post("/tokenize", json={"prompt": "Grüße", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 7 and found["max_model_len"] == 4096
    assert post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "Grüße"}
    chat = post("/tokenize", json={"messages": BODY["messages"]}).json()
    text = post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<s>user:Hi</s><s>assistant:"
    for bad in ({}, {"prompt": "x", "messages": []}, {"messages": [{"role": "x"}]}, {"prompt": "x", "tools": []}):
        assert post("/tokenize", json=bad).status_code == 400, bad
    assert post("/detokenize", json={"tokens": [1 << 20]}).json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(("content", "headers", "status"), [
    (b"{", {"content-type": "application/json"}, 400), (b"", {"content-type": "application/json"}, 400),
    (b"[" * 10000, {"content-type": "application/json"}, 400), (b"{}", {"content-type": "text/plain"}, 415),
    (b"\xff\xfe", {"content-type": "application/json"}, 400), (b"{}", {}, 415),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {"content-type": "application/json"}, 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', {"content-type": "application/json"},
     400),
])
def test_a_bad_body_is_told_so(server: Served, content: bytes, headers: dict[str, str], status: int) -> None:
    response = server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == status and response.json()["error"]["message"]


def test_unknown_paths_and_methods_have_the_error_shape(server: Served) -> None:
    for response, status in ((server.http.get("/v1/chat/completions"), 405), (server.http.get("/nope"), 404),
                             (server.http.post("/v1/embeddings", json={}), 404)):
        assert response.status_code == status and set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert server.http.get("/v1/completions").headers["allow"] == "POST"


# ---- keys


def test_every_route_but_health_wants_a_key(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys\nann secret-of-ann\n\nsecret-of-nobody\n")
    server = serve(api_key_file=str(file))
    paths = [(route.method, route.path.replace("{model}", "scripted")) for route in ROUTES]
    for method, path in [*paths, ("GET", "/nope")]:
        if path in ("/health", "/nope"):
            continue
        for headers in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": "secret-of-ann"},
                        {"authorization": "Basic secret-of-ann"}, {"authorization": "Bearer"}):
            response = server.http.request(method, path, headers=headers)
            assert response.status_code == 401, (path, headers)
            error = response.json()["error"]
            assert "invalid_api_key" in error.get("code", "") or error["type"] == "authentication_error"
    assert server.http.get("/health").status_code == 200
    for key, tenant in (("secret-of-ann", "ann"), ("secret-of-nobody", None)):
        answer = server.http.post("/v1/chat/completions", json=BODY, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        more = server.engine.asked[-1][2]
        assert more["tenant"] == tenant or (tenant is None and more["tenant"].startswith("key-"))
        assert more["cache_salt"] is not None


def test_tenants_never_share_a_salt() -> None:
    salts = [salt_of(tenant, salt) for tenant in ("a", "b", "1:a") for salt in (None, "", "x", "a", "salt:")]
    assert len(set(salts)) == len(salts) and None not in salts
    assert salt_of(None, None) is None and salt_of(None, "x") == "x"


def test_keys_come_from_the_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEYS", "first-key, second-key")
    keys = ApiKeys.of(ServerConfig.create())
    assert len(keys) == 2
    assert keys.tenant(b"Bearer first-key") != keys.tenant(b"Bearer second-key") is not None
    assert keys.tenant(b"Bearer third-key") is None and keys.tenant(None) is None


@pytest.mark.parametrize("text", ["", "short", "a b c", "samesame\nsamesame", "x samesame\nx othersame", "schlüssel-ü"])
def test_keys_that_make_no_sense_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError):
        ApiKeys.of(ServerConfig.create(api_key_file=str(file)))


def test_a_public_address_without_a_key_warns(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire.server"):
        serve(host="0.0.0.0")
    assert any(record.message == "public_without_key" and "QUIRE_API_KEYS" in record.fields["advice"]
               for record in caplog.records)


def test_no_page_of_another_origin_may_read_answers_unless_allowed(serve: Serve, server: Served) -> None:
    page = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert server.http.options("/v1/models", headers=page).status_code == 405
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=page).headers
    friendly = serve(allowed_origins="http://good.example")
    good = friendly.http.get("/v1/models", headers={"origin": "http://good.example"})
    assert good.headers["access-control-allow-origin"] == "http://good.example"
    assert "access-control-allow-origin" not in friendly.http.get("/v1/models", headers=page).headers


# ---- limits


def test_bodies_headers_schemas_and_connections_are_bounded(serve: Serve) -> None:
    server = serve(max_body_size=2000, max_connections=3, max_schema_size=100, read_timeout=1.5)
    large = {"messages": [{"role": "user", "content": "x" * 3000}]}
    assert server.http.post("/v1/chat/completions", json=large).status_code == 413

    def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 100

    chunked = server.http.post("/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"})
    assert chunked.status_code == 413
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"description": "x" * 200}}}
    refused = server.http.post("/v1/chat/completions", json={**BODY, "response_format": schema})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "schema_too_large"
    assert server.http.get("/health", headers={"x-much": "y" * 70000}).status_code == 431
    _too_many_connections(server)


def _too_many_connections(server: Served) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    server.http.close()
    server.http = httpx.Client(base_url=server.address)
    idle = [socket.create_connection((host, int(port))) for _ in range(3)]
    refused = socket.create_connection((host, int(port)))
    refused.settimeout(60)
    assert b"503" in refused.recv(100)
    idle[0].settimeout(60)
    assert idle[0].recv(1) == b""  # said nothing for read_timeout
    for each in [*idle, refused]:
        each.close()
    _until(lambda: httpx.get(f"{server.address}/health").status_code == 200)


def test_a_slow_body_is_given_up(serve: Serve) -> None:
    server = serve(read_timeout=0.3)
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                     b"content-length: 100\r\n\r\n{")
        slow.settimeout(60)
        assert b" 408 " in slow.recv(1000)


# ---- faults


@pytest.mark.parametrize(("error", "status", "code"), [
    (QueueFullError("256 requests wait", 2.5), 429, "queue_full"),
    (EngineDeadError("restarting", 0.5), 503, "engine_restarting"),
    (EngineDeadError("given up"), 500, "engine_dead"),
    (RequestTimeoutError("not done within 3 seconds"), 504, "request_timeout"),
    (InvalidRequestError("top_k holds 5", field="top_k"), 400, None),
    (ZeroDivisionError("secret of the house"), 500, "internal_error"),
])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_have_a_status(serve: Serve, error: Exception, status: int, code: str | None,
                                              stream: bool) -> None:
    server = serve()
    server.engine.refuses = error
    response = server.chat("Hi", stream=stream)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code and "secret" not in response.text
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    server.engine.refuses = None
    assert server.chat("Hi").status_code == 200


def test_an_engine_that_dies_in_the_middle_ends_streams_with_an_error(serve: Serve) -> None:
    server = serve()
    server.engine.fails_after = (3, EngineDeadError("the engine died", 1.0))
    assert server.chat("Hi").status_code == 500
    text = server.chat("Hi", stream=True).text
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_dead" and "[DONE]" not in text
    import openai

    with pytest.raises(openai.APIError, match="the engine died"):
        for _ in server.openai.chat.completions.create(model="scripted", stream=True, **BODY):  # type: ignore[call-overload]
            pass


def test_health_is_503_when_the_engine_is_dead(serve: Serve) -> None:
    server = serve()
    server.engine.healthy = False
    response = server.http.get("/health")
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
    assert "quire:engine_up" in server.http.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(serve: Serve, stream: bool) -> None:
    server = serve("x" * 3000)
    server.engine.delay = 0.01
    host, port = server.address.removeprefix("http://").split(":")
    body = json.dumps({**BODY, "stream": stream}).encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                       b"content-length: %d\r\n\r\n%s" % (len(body), body))
        _until(lambda: server.engine.running == 1)
    _until(lambda: server.engine.running == 0)
    assert len(server.engine.aborted) == 1 and not server.app.service.active


def test_a_slow_reader_holds_up_nobody(serve: Serve) -> None:
    server = serve("y" * 4000)
    host, port = server.address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 4000}).encode()
    with socket.create_connection((host, int(port))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n%s" % (len(body), body))
        _until(lambda: server.engine.running == 1)
        assert server.complete("x", max_tokens=100).json()["usage"]["completion_tokens"] == 100


def test_closing_lets_running_requests_finish_and_refuses_new_ones(serve: Serve) -> None:
    import asyncio

    server = serve("z" * 50)
    server.engine.delay = 0.02
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(server.chat("Hi").json()))
    thread.start()
    _until(lambda: server.engine.running == 1)
    loop = next(iter(server.app.service.active)).get_loop()
    drained = asyncio.run_coroutine_threadsafe(server.app.drain(30.0), loop)
    _until(lambda: server.app.service.draining)
    other = httpx.Client(base_url=server.address)
    refused = other.post("/v1/chat/completions", json=BODY)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert other.get("/health").status_code == 503
    thread.join(30)
    drained.result(30)
    assert done[0]["choices"][0]["message"]["content"] == "z" * 50


def test_closing_ends_what_does_not_finish_in_time(serve: Serve) -> None:
    import asyncio

    server = serve("z" * 4000)
    server.engine.delay = 0.05
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(server.chat("Hi", stream=True).text))
    thread.start()
    _until(lambda: server.engine.running == 1)
    time.sleep(0.3)
    loop = next(iter(server.app.service.active)).get_loop()
    asyncio.run_coroutine_threadsafe(server.app.drain(0.1), loop).result(30)
    thread.join(30)
    assert '"code":"closing"' in found[0]


# ---- logs and spans


def test_requests_are_logged_with_their_id(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire.server"):
        response = server.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "mine-1"})
        name = response.headers["x-request-id"]
        assert name == "mine-1" and response.json()["id"].startswith("chatcmpl-mine-1-")
        _until(lambda: any(getattr(record, "fields", {}).get("request_id") == name for record in caplog.records))
    record = next(record for record in caplog.records if getattr(record, "fields", {}).get("request_id") == name)
    line = json.loads(JsonLines().format(record))
    assert line["event"] == "request" and line["status"] == 200 and line["completion_tokens"] == 14
    assert "Hello" not in json.dumps(line)
    strange = server.http.get("/health", headers={"x-request-id": 'a"b{}'}).headers["x-request-id"]
    assert '"' not in strange


def test_spans_tell_of_requests() -> None:
    import asyncio

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from quire.server.app import build_app
    from quire.server.telemetry.tracing import Tracing

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = ScriptedEngine(make_tokenizer(), "Hello")
    app = build_app(engine, ServerConfig.create(), keys=ApiKeys(), tracing=Tracing(provider.get_tracer("q"), provider))
    trace = "0af7651916cd43dd8448eb211c80319c"

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post("/v1/chat/completions", json=BODY,
                              headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
            engine.refuses = EngineDeadError("given up")
            await client.post("/v1/chat/completions", json=BODY)
            await client.get("/wherever/else")

    asyncio.run(ask())
    good, bad, other = exporter.get_finished_spans()
    assert good.name == bad.name == "POST /v1/chat/completions" and other.name == "GET other"
    assert f"{good.context.trace_id:032x}" == trace
    assert good.attributes["gen_ai.usage.output_tokens"] == 6 and good.attributes["http.response.status_code"] == 200
    assert good.status.is_ok or good.status.is_unset
    assert not bad.status.is_ok and not bad.status.is_unset and bad.attributes["http.response.status_code"] == 500
    assert Tracing().start({}) is None


def _until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
