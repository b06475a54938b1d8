"""The index of a KV pool that a router keeps, asked over HTTP by those who have the secret, and by nobody else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from quire.errors import QuireError
from quire.kvcache.secret import derived_secret
from quire.kvpool.index import HttpIndex
from tests.router.fakes import routed


def test_engines_find_each_other_through_the_router(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a secret of the tests")
    with routed([], kv_secret_file=str(file)) as (address, service):
        index = HttpIndex(address, derived_secret(b"a secret of the tests", "kv-index"))
        index.publish("engine#1", [b"x" * 16, b"y" * 16], lease=60.0)
        assert index.query([b"y" * 16, b"z" * 16]) == [["engine#1"], []]
        assert index.heartbeat("engine#1", 60.0) and not index.heartbeat("engine#2", 60.0)
        assert httpx.get(f"{address}/v1/router/servers").json()["pool"]["engine#1"] == 2
        index.close()
        stranger = HttpIndex(address, derived_secret(b"another secret of theirs", "kv-index"))
        with pytest.raises(QuireError):
            stranger.query([b"y" * 16])
        stranger.close()
        assert service.units.num_units == 2


def test_a_router_without_the_secret_keeps_none() -> None:
    with routed([]) as (address, _):
        reply = httpx.post(f"{address}/kv-index/query", json={"names": []})
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "no_kv_secret"
