"""Servers that register themselves: they come, go, die and come back; nobody else can bring one."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import ConfigError
from quire.router import registration
from quire.router.registration import SIGNATURE, Heartbeat, check_registration
from quire.router.replica import State
from quire.router.upstream import Upstream
from quire.server_config import ServerConfig
from tests.router.fakes import FakeServer, fakes, routed
from tests.router.test_passage import PLAIN, post
from tests.server.conftest import tiny as tiny
from tests.server.real import PATIENCE, quire_serve, until

SECRET = b"a secret of the tests"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    return str(file)


def beat(router: str, url: str, secret: bytes | None = SECRET, leaving: bool = False, role: str = "both") -> None:
    asyncio.run(Heartbeat(router, url, secret, role).beat(leaving))


def test_a_server_comes_says_goodbye_and_is_forgotten(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "LEASE_SECONDS", 0.5)
    server = FakeServer()
    with fakes(server) as (url,), routed([], kv_secret_file=secret) as (router, service):
        assert post(router, PLAIN).status_code == 503
        beat(router, url)
        until(lambda: post(router, PLAIN).status_code == 200)
        beat(router, url, leaving=True)
        assert next(iter(service.fleet)).state is State.DRAINING
        until(lambda: len(service.fleet) == 0)
        assert post(router, PLAIN).status_code == 503


def test_only_who_has_the_secret_can_bring_a_server(secret: str) -> None:
    server = FakeServer()
    with fakes(server) as (url,), routed([], kv_secret_file=secret) as (router, service):
        for wrong in (None, b"another secret of theirs"):
            beat(router, url, wrong)
        body = {"url": url, "role": "both", "time": time.time() - 3600.0, "leaving": False}
        old = json.dumps(body).encode()
        headers = {SIGNATURE.decode(): registration._signed(SECRET, old).decode(), "content-type": "application/json"}
        assert httpx.post(f"{router}/v1/router/servers", content=old, headers=headers).status_code == 400
        for bad in ({**body, "time": time.time(), "role": "king"}, {**body, "time": time.time(), "url": "file:///etc"},
                    [1], {"url": 5}):
            data = json.dumps(bad).encode()
            headers[SIGNATURE.decode()] = registration._signed(SECRET, data).decode()
            assert httpx.post(f"{router}/v1/router/servers", content=data, headers=headers).status_code == 400
        assert len(service.fleet) == 0


def test_without_a_secret_only_a_loopback_router_without_keys_takes_servers(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice alice-key-123\n")
    server = FakeServer()
    with fakes(server) as (url,):
        with routed([]) as (router, service):
            beat(router, url, None)
            assert len(service.fleet) == 1
        with routed([], server={"api_key_file": str(keys)}) as (router, service):
            beat(router, url, None)
            assert len(service.fleet) == 0


def test_what_the_command_line_says_of_a_server_holds(secret: str) -> None:
    server = FakeServer()
    with fakes(server) as (url,), routed([url], kv_secret_file=secret) as (router, service):
        beat(router, url, role="prefill")
        beat(router, url, leaving=True)
        replica = next(iter(service.fleet))
        assert replica.role.value == "both" and replica.leased_until is None and replica.state is State.UP


def test_a_real_server_registers_itself(tiny: Path, tmp_path: Path, secret: str) -> None:
    with routed([], kv_secret_file=secret, policy="cache-aware") as (router, service):
        words: list[Any] = ["--executor", "dummy", "--load-format", "dummy", "--register", router, "--kv-secret-file",
                            secret]
        with quire_serve(tiny, tmp_path / "log", *words) as server:
            until(lambda: len(service.fleet) == 1 and next(iter(service.fleet)).available, PATIENCE)
            assert next(iter(service.fleet)).url == server.address
            assert post(router, PLAIN).status_code == 200
            until(lambda: next(iter(service.fleet)).events == "following")
        until(lambda: len(service.fleet) == 0 or not next(iter(service.fleet)).available)


def test_a_server_that_cannot_say_where_it_is_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        check_registration(ServerConfig.create(host="0.0.0.0", register="http://router:8000"))
    assert error.value.field == "advertise"
    check_registration(ServerConfig.create(host="0.0.0.0", register="http://r:8000", advertise="http://me:8000"))


def test_an_address_is_the_same_server_however_it_is_written(secret: str) -> None:
    server = FakeServer()
    with fakes(server) as (url,), routed([], kv_secret_file=secret) as (router, service):
        for written in (url, f"{url}/v1", f"{url}/", f"{url}/v1/"):
            beat(router, written)
            leased = [each.leased_until for each in service.fleet]
            assert len(leased) == 1
            time.sleep(0.01)
            beat(router, written)
            assert [each.leased_until for each in service.fleet] > leased


@pytest.mark.parametrize("url", ["http://host:99999", "http://host:x", "http://[::1", "http://a b", "http://ho\x7fst",
                                 "ftp://host", "http://", "http://u@host", "host:8000", "http://h/a b"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        Upstream(url)
