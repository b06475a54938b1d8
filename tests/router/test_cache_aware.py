"""Cache-aware with real servers: the router knows what each holds, in tokens, before it asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.kvcache.secret import secret_name
from quire.router.app import RouterService
from quire.router.replica import State
from tests.router.fakes import FakeServer, fakes, routed
from tests.server.conftest import tiny as tiny
from tests.server.real import ServeProcess, quire_serve, until

SECRET = "a secret of the tests"
WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom. "


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text(SECRET)
    return str(file)


@pytest.fixture(scope="module")
def servers(tiny: Path, secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServeProcess]]:
    folder = tmp_path_factory.mktemp("logs")
    keys = folder / "keys"
    keys.write_text("alice alice-key-123\nbob bob-key-12345\nrouter router-key-12\n")
    with contextlib.ExitStack() as stack:
        words = ("--executor", "dummy", "--load-format", "dummy", "--num-kv-blocks", "400", "--api-key-file", str(keys))
        found = [stack.enter_context(quire_serve(tiny, folder / f"log{number}", *words, "--kv-secret-file", secret,
                                                 "--block-size", str(size)))
                 for number, size in enumerate((16, 16, 8))]
        found.append(stack.enter_context(quire_serve(tiny, folder / "log3", *words)))
        yield found


@contextlib.contextmanager
def router(servers: list[ServeProcess], tiny: Path, secret: str, monkeypatch: pytest.MonkeyPatch,
           ) -> Iterator[tuple[httpx.Client, RouterService]]:
    monkeypatch.setenv("QUIRE_REPLICA_KEY", "router-key-12")
    keys = str(Path(servers[0].log).parent / "keys")
    with routed([each.address for each in servers], policy="cache-aware", kv_secret_file=secret, tokenizer=str(tiny),
                server={"api_key_file": keys}) as (address, service), \
            httpx.Client(base_url=address, timeout=120.0, headers={"authorization": "Bearer alice-key-123"}) as http:
        until(lambda: all(each.state is State.UP for each in service.fleet))
        until(lambda: [each.events for each in service.fleet] == ["following"] * 3 + ["none"])
        yield http, service


def settled(service: RouterService, servers: list[ServeProcess]) -> None:
    """The router knows what the servers hold."""
    def same() -> bool:
        for replica, server in zip(service.fleet, servers[:3], strict=False):
            held = service.blocks_of(replica)
            text = server.http.get("/metrics", headers={"authorization": "Bearer router-key-12"}).text
            values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                      if line.startswith("quire:kv_blocks")}
            if held != values["quire:kv_blocks_cached"] or values["quire:kv_blocks_used"]:
                return False
        return True

    until(same)


def bodies(text: str) -> dict[str, dict[str, Any]]:
    chat = [{"role": "system", "content": text}, {"role": "user", "content": "And?"}]
    return {"/v1/completions": {"prompt": text, "max_tokens": 4, "ignore_eos": True},
            "/v1/chat/completions": {"messages": chat, "max_tokens": 4},
            "/v1/responses": {"instructions": text, "input": "And?", "max_output_tokens": 4},
            "/v1/messages": {"system": text, "messages": chat[1:], "max_tokens": 4}}


def cached_tokens(path: str, answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    return int(usage["input_tokens_details" if path == "/v1/responses" else "prompt_tokens_details"]["cached_tokens"])


def test_it_knows_to_the_token_what_a_server_will_find(servers: list[ServeProcess], tiny: Path, secret: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    with router(servers, tiny, secret, monkeypatch) as (http, service):
        for number, (path, body) in enumerate(bodies("").items()):
            for turn in range(3):
                body = bodies(f"{number}. " + WORDS * 4 + "more " * turn)[path]
                reply = http.post(path, json=body)
                assert reply.status_code == 200, reply.text
                decision = service.fleet.decisions[-1]
                assert decision.held == cached_tokens(path, reply.json()), (path, turn)
                assert (decision.held > 200) == (turn > 0)
                settled(service, servers)
        assert service.metrics.held_tokens > 1500


def test_prompts_of_another_key_are_another_prefix(servers: list[ServeProcess], tiny: Path, secret: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    with router(servers, tiny, secret, monkeypatch) as (http, service):
        body = {"prompt": "secret " + WORDS * 3, "max_tokens": 2}
        held = []
        for key in ("alice-key-123", "bob-key-12345", "alice-key-123"):
            for salt in ({}, {"cache_salt": "s"}):
                http.post("/v1/completions", json={**body, **salt}, headers={"authorization": f"Bearer {key}"})
                held.append(service.fleet.decisions[-1].held > 0)
                settled(service, servers)
        assert held == [False, False, False, False, True, True]


def test_what_a_client_sends_cannot_hurt_the_index(servers: list[ServeProcess], tiny: Path, secret: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    with router(servers, tiny, secret, monkeypatch) as (http, service):
        settled(service, servers)
        before = service.num_blocks
        for path in bodies(""):
            for body in (b"{", b"[]", b'{"messages": 5}', b'{"prompt": [[]]}', b'{"prompt": [4000000000]}', b"[" * 5000,
                         b'{"prompt": "\xff"}', b'{"messages":[{"role":"user","content":"\\ud800"}]}'):
                assert http.post(path, content=body, headers={"content-type": "application/json"}).status_code == 400
        assert http.get("/v1/kv/events").status_code == 404  # what the servers hold is not for clients
        settled(service, servers)
        assert service.num_blocks == before
        assert {each.state for each in service.fleet} == {State.UP}


def test_events_go_on_where_they_were_left(servers: list[ServeProcess]) -> None:
    server, key = servers[0], {"authorization": "Bearer router-key-12"}
    assert server.http.get("/v1/kv/events").status_code == 401
    assert server.http.get("/v1/kv/events?after=x", headers=key).status_code == 400
    assert servers[3].http.get("/v1/kv/events", headers=key).json()["error"]["code"] == "no_kv_events"

    def first(query: str = "") -> dict[str, Any]:
        with server.http.stream("GET", f"/v1/kv/events{query}", headers=key) as reply:
            line = next(reply.iter_lines())
        found: dict[str, Any] = httpx.Response(200, content=line.removeprefix("data: ")).json()
        return found

    start = first()
    assert start["type"] == "start" and not start["resumed"] and start["block_size"] == 16
    assert SECRET not in str(start) and len(start["secret"]) == 32
    again = first(f"?epoch={start['epoch']}&after={start['sequence']}")
    assert again["resumed"] and again["sequence"] == start["sequence"]
    assert not first(f"?epoch=other&after={start['sequence']}")["resumed"]


def test_a_restarted_engine_holds_nothing(servers: list[ServeProcess], tiny: Path, secret: str,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    with router(servers, tiny, secret, monkeypatch) as (http, service):
        number = 3
        while number == 3:  # the one that says nothing
            body = {"prompt": f"{len(service.fleet.decisions)} again " + WORDS * 3, "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
            number = service.fleet.decisions[-1].number
        settled(service, servers)
        replica = next(each for each in service.fleet if each.number == number)
        assert service.blocks_of(replica)
        servers[number].kill_engine()
        until(lambda: service.blocks_of(replica) == 0)
        until(lambda: replica.available and replica.events == "following", 120.0)


@pytest.mark.parametrize("said", [
    b"nonsense", b'{"type":"change","sequence":1,"stored":"00"}',
    b'{"type":"start","version":9}', b'{"type":"start","version":1,"block_size":0}',
    b'{"type":"start","version":1,"block_size":16,"secret":"another"}',
    b'{"type":"start","version":1,"block_size":16,"secret":"%s","epoch":"e","sequence":4}\n\n'
    b'data: {"type":"change","sequence":9,"stored":""}',
    b'{"type":"start","version":1,"block_size":16,"secret":"%s","epoch":"e","sequence":4}\n\n'
    b'data: {"type":"held","names":"0011"}',
    b'{"type":"start","version":1,"block_size":16,"secret":"%s","epoch":"e","sequence":4}\n\n'
    b'data: {"type":"held","names":"zz"}',
])
def test_events_that_are_nonsense_cost_a_server_its_hits_and_nothing_else(said: bytes, secret: str) -> None:
    liar = FakeServer()
    liar.kv_events = b"data: " + said.replace(b"%s", secret_name(SECRET.encode()).encode()) + b"\n\n"
    with fakes(liar) as urls, routed(urls, policy="cache-aware", kv_secret_file=secret) as (address, service):
        until(lambda: liar.asked_events)
        until(lambda: next(iter(service.fleet)).events != "none")
        assert service.num_blocks == 0
        assert httpx.post(f"{address}/v1/completions", json={"prompt": [1, 2, 3]}).status_code == 200
