"""Engines that share a real Mooncake Store, whose master is killed, stopped and started anew."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.kvpool.mooncake import MooncakeAddress
from tests.kvpool.pool_engines import PROMPT, SECRET, TWO_RANKS, ask, open_engine, said, wait_for
from tests.kvpool.servers import Listening, free_port

try:
    import mooncake.store  # needs libraries of the system too

    MISSING = None
    MASTER = shutil.which("mooncake_master", path=str(Path(mooncake.store.__file__).parent))
except ImportError as error:
    MISSING, MASTER = f"Mooncake does not load here: {error}", None
needs_mooncake = pytest.mark.skipif(MISSING is not None or MASTER is None, reason=MISSING or "no mooncake_master here")


class Master(Listening):
    """A `mooncake_master` on a port of its own."""

    def __init__(self) -> None:
        assert MASTER is not None
        port = free_port()
        super().__init__(port, [MASTER, f"--rpc_port={port}", f"--metrics_port={free_port()}",
                                "--rpc_address=127.0.0.1"])

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?segment=64MiB&buffer=32MiB"


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)
    master = Master()
    yield master
    master.kill()


@needs_mooncake
def test_another_engine_finds_what_one_has_computed(master: Master, models: Any) -> None:
    for family, units in (("llama", 2), ("gemma3", 4)):  # two for each group of layers
        with open_engine(models(family), None) as llm:
            plain = said(ask(llm))
        with open_engine(models(family), master.url) as first, \
                open_engine(models(family), master.url, 32, **TWO_RANKS) as second:
            for engine in (first, second):
                wait_for(engine, "kv_pool_connected", 1)
            assert said(ask(first)) == plain
            wait_for(first, "kv_pool_units_written", units)
            answer = ask(second)
            assert said(answer) == plain and answer.num_cached_tokens == 512


@needs_mooncake
def test_a_master_that_dies_hangs_or_comes_back_empty_costs_hits_only(master: Master, models: Any) -> None:
    with open_engine(models("llama"), None) as llm:
        plain = said(ask(llm))
    prompts = [[token, *PROMPT] for token in range(3, 30)]
    with open_engine(models("llama"), master.url, kv_lookup_timeout=50.0) as llm:
        wait_for(llm, "kv_pool_connected", 1)
        assert said(ask(llm)) == plain
        wait_for(llm, "kv_pool_units_written", 2)
        master.process.send_signal(signal.SIGSTOP)
        for prompt in prompts[:6]:
            assert ask(llm, prompt).num_cached_tokens == 0
        opened = llm.metrics()["kv_pool_circuit_opened"]
        assert opened >= 1
        # Nobody waits for it any more: questions are answered before they are asked.
        assert ask(llm, prompts[6]).num_cached_tokens == 0
        master.kill()
        ask(llm, prompts[7])
        master.start()
        until = time.monotonic() + 120.0
        for number in range(10**6):
            answer = ask(llm, [5, number % 90 + 3, number // 90 % 90 + 3, *PROMPT])
            assert answer.num_cached_tokens == 0
            if llm.metrics()["kv_pool_units_written"] > 4:
                break
            assert time.monotonic() < until, "it was never used again"
            time.sleep(0.2)


@needs_mooncake
def test_an_engine_starts_without_its_pool(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)
    with open_engine(models("llama"), f"mooncake://127.0.0.1:{free_port()}", kv_lookup_timeout=5.0) as llm:
        for _ in range(2):
            ask(llm)


def test_addresses_say_what_is_wrong_with_them(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MooncakeAddress.parse("mooncake://h:1?segment=0&buffer=1MiB&protocol=rdma&device=mlx5_0") == MooncakeAddress(
        "h:1", segment=0, buffer=1 << 20, protocol="rdma", device="mlx5_0")
    for wrong in ("mooncake://", "mooncake://h", "mooncake://h:x", "mooncake://h:1?size=3", "mooncake://h:1?buffer=x"):
        with pytest.raises(ConfigError):
            MooncakeAddress.parse(wrong)
    monkeypatch.delenv("QUIRE_KV_SECRET", raising=False)
    with pytest.raises(ConfigError, match="QUIRE_KV_SECRET"):
        open_engine(models("llama"), "mooncake://127.0.0.1:1")
    with pytest.raises(ConfigError, match="must begin with"):
        open_engine(models("llama"), "memcached://127.0.0.1:1")
