"""One contract for every index, in memory, behind HTTP and in a real Redis; and peers that read from each other."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import ConfigError, KVTransferError
from quire.kvcache.secret import derived_secret
from quire.kvpool.index import HttpIndex, IndexRoutes, MemoryIndex, UnitIndex, sign
from quire.kvpool.keys import KEY_BYTES, unit_name
from quire.kvpool.memory import MemoryStore
from quire.kvpool.peer_server import PeerServer, connect
from quire.kvpool.peers import PeerOptions, PeerStore
from quire.kvpool.unit import check, seal
from tests.kvpool.pool_engines import SECRET, TWO_RANKS, ask, open_engine, said, wait_for
from tests.kvpool.servers import Redis, index_over_http

SECRET_BYTES = SECRET.encode()
A, B, C = (unit_name(bytes([number]) * KEY_BYTES, 0) for number in (1, 2, 3))


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    server = Redis()
    yield server
    server.kill()


@pytest.fixture(params=["memory", "http", "redis"])
def index(request: pytest.FixtureRequest) -> Iterator[UnitIndex]:
    if request.param == "memory":
        yield MemoryIndex()
    elif request.param == "http":
        with index_over_http(SECRET_BYTES) as (url, _):
            found = HttpIndex(url, derived_secret(SECRET_BYTES, "kv-index"))
            yield found
            found.close()
    else:
        from quire.kvpool.redis_index import RedisIndex

        server: Redis = request.getfixturevalue("redis")
        made = RedisIndex(server.url, f"space-{time.time_ns()}")
        yield made
        made.close()


def test_owners_are_found_until_they_withdraw_or_their_lease_ends(index: UnitIndex) -> None:
    assert index.query([A, B]) == [[], []] and index.query([]) == []
    assert index.heartbeat("one#1", 60.0) is False
    index.publish("one#1", [A, B], 60.0)
    index.publish("two#1", [B], 60.0)
    assert index.query([A, B, C]) == [["one#1"], ["one#1", "two#1"], []]
    assert index.heartbeat("one#1", 60.0) is True
    index.withdraw("one#1", [B, C])
    assert index.query([A, B]) == [["one#1"], ["two#1"]]
    index.publish("brief#1", [C], 0.1)
    until = time.monotonic() + 60.0
    while index.query([C]) != [[]]:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert index.heartbeat("brief#1", 60.0) is False


def test_routes_refuse_those_without_the_secret_and_what_is_no_question() -> None:
    index = MemoryIndex()
    routes = IndexRoutes(index, b"k" * 32)
    body = json.dumps({"owner": "a#1", "names": [A.hex()], "lease": 10}).encode()
    assert routes.handle("/kv-index/publish", body, None)[0] == 403
    assert routes.handle("/kv-index/publish", body, sign(b"other" * 7, "/kv-index/publish", body))[0] == 403
    assert routes.handle("/kv-index/publish", body, sign(b"k" * 32, "/kv-index/withdraw", body))[0] == 403
    assert index.num_units == 0
    assert routes.handle("/kv-index/publish", body, sign(b"k" * 32, "/kv-index/publish", body))[0] == 200
    assert index.owners == {"a#1": 1}
    for wrong in (b"", b"[]", b"{", b'{"names": ["zz"]}', b'{"names": 5}', b'{"lease": "x"}', b'{"lease": 1e9}'):
        assert routes.handle("/kv-index/query", wrong, sign(b"k" * 32, "/kv-index/query", wrong))[0] == 400
    assert routes.handle("/kv-index/other", body, sign(b"k" * 32, "/kv-index/other", body))[0] == 404


def unit(name: bytes, content: bytes = b"KV" * 500) -> tuple[bytes, memoryview]:
    return seal(name, content, 1), memoryview(content)


def test_memory_keeps_the_last_used_and_tells_who_made_room() -> None:
    store = MemoryStore(2 * (len(unit(A)[0]) + 1000))
    assert store.write(A, *unit(A)) and store.write(B, *unit(B))
    assert store.read(A) is not None and store.write(C, *unit(C))
    assert store.find([A, B, C]) == [True, False, True] and store.take_evicted() == [B] and store.take_evicted() == []
    assert not store.write(B, b"", memoryview(bytes(10_000))) and store.num_units == 2
    assert store.clear() == 2 and store.num_bytes == 0 and sorted(store.take_evicted()) == [A, C]


def test_peers_read_from_each_other_and_go_on_when_one_dies() -> None:
    index = MemoryIndex()
    one, two, three = (PeerStore(index, SECRET_BYTES, 1 << 20, lease=60.0) for _ in range(3))
    for store in (one, two):
        store.write(A, *unit(A))
    until = time.monotonic() + 60.0
    while len(index.query([A])[0]) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert three.find([A, B]) == [True, False]
    found = three.read(A)
    assert found is not None and bytes(check(A, found, 1)) == b"KV" * 500 and three.read(B) is None
    # Both peers vanish without a word; the index still names them.
    first = next(iter(three._connections))
    (one if one.owner == first else two).server.close()
    three._connections[first].close()
    assert three.find([A]) == [True] and three.read(A) is not None
    for store in (one, two):
        store.server.close()
    for connection in three._connections.values():
        connection.close()
    assert three.read(A) is None and three.find([A]) == [False]
    for store in (one, two, three):
        store.close()
    assert index.query([A]) == [[]]


def test_who_does_not_have_the_secret_reads_nothing() -> None:
    store = MemoryStore(1 << 20)
    store.write(A, *unit(A))
    server = PeerServer(store, b"k" * 32)
    connect(server.address, b"k" * 32, 30.0).close()
    with pytest.raises((KVTransferError, OSError)):
        connect(server.address, b"x" * 32, 30.0)
    until = time.monotonic() + 60.0
    while server.num_refused < 1:
        assert time.monotonic() < until
        time.sleep(0.01)
    # Somebody who only listens, pretending to be a peer, does not get a reader's name of a unit.
    with socket.create_server(("127.0.0.1", 0)) as fake:
        import threading

        def pretend() -> None:
            connection, _ = fake.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(1000)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(KVTransferError, match="does not have the secret"):
            connect(f"127.0.0.1:{fake.getsockname()[1]}", b"k" * 32, 30.0)
        thread.join()
    server.close()


def test_options_say_what_is_wrong_with_them() -> None:
    assert PeerOptions.parse("redis://h:1/2?share=2MiB&listen=10.0.0.7:99&lease=3&ssl_cert_reqs=none") == PeerOptions(
        "redis://h:1/2?ssl_cert_reqs=none", 2 << 20, "10.0.0.7:99", 3.0)
    for wrong in ("?lease=x", "?lease=0", "?share=many", "?listen=here", "?listen=:5", "?listen=h:99999",
                  "?listen=0.0.0.0:99", "?listen=[::]:99"):
        with pytest.raises(ConfigError):
            PeerOptions.parse(f"redis://h:1{wrong}")


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0?shar=1GiB", "http://127.0.0.1:1?shar=1GiB"])
def test_an_option_that_there_is_not_is_refused_and_not_ignored(url: str) -> None:
    with pytest.raises(ConfigError, match="shar"):
        PeerOptions.parse(url).open_index(SECRET_BYTES)


@pytest.mark.parametrize("kind", ["redis", "http"])
def test_an_engine_fetches_what_its_peer_computed(kind: str, request: pytest.FixtureRequest, models: Any,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)
    model = models("gemma3")
    with open_engine(model, None) as llm:
        plain = said(ask(llm))
    with index_over_http(SECRET_BYTES) as (url, _):
        pool = f"{request.getfixturevalue('redis').url if kind == 'redis' else url}?share=32MiB&lease=60"
        with open_engine(model, pool, 32, **TWO_RANKS) as second, open_engine(model, pool) as first:
            assert said(ask(first)) == plain
            wait_for(first, "kv_pool_units_written", 4)
            index = PeerOptions.parse(pool).open_index(SECRET_BYTES)
            names = first._core.scheduler.cache.tiers[0].store.memory.names()  # type: ignore[attr-defined]
            until = time.monotonic() + 120.0
            while not all(index.query(names)):
                assert time.monotonic() < until
                time.sleep(0.01)
            index.close()
            answer = ask(second)
            assert said(answer) == plain and answer.num_cached_tokens == 512
            # It is not published once more by who has fetched it.
            assert second.metrics()["kv_pool_units_written"] == 0
        # The first one has gone: what it had is a miss.
        with open_engine(model, pool) as third:
            answer = ask(third)
            assert said(answer) == plain and answer.num_cached_tokens == 0
