"""`quire serve --data-parallel-size 2`: two engines behind one port, as one server to everybody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.router.engines import ReplicatedLLM
from tests.router.test_kills import judge, load
from tests.server.conftest import tiny as tiny
from tests.server.real import PATIENCE, ServeProcess, quire_serve, until

WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    with quire_serve(tiny, log, "--executor", "dummy", "--load-format", "dummy", "--dummy-step-ms", "10",
                     "--num-kv-blocks", "500", "--max-num-seqs", "8", "--data-parallel-size", "2") as found:
        yield found


def engines(server: ServeProcess) -> list[int]:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children
            if b"quire.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_two_engines_share_the_work_and_remember_prefixes(server: ServeProcess) -> None:
    assert len(engines(server)) == 2 and server.metric("kv_blocks_total") == 1000
    replies = asyncio.run(load(server.address, 24, lambda: None))
    assert judge(replies) == (24, 0)
    for number in range(4):  # each of them at the engine that has seen it
        for turn in range(3):
            body = {"prompt": f"{number} {WORDS}" + "more " * turn, "max_tokens": 2}
            usage = server.http.post("/v1/completions", json=body).json()["usage"]
            assert (usage["prompt_tokens_details"]["cached_tokens"] > 250) == (turn > 0)


def test_the_page_shows_both(server: ServeProcess) -> None:
    seen: set[int] = set()
    with server.http.stream("GET", "/v1/engine/events") as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                frame = json.loads(line[6:])
                if frame["full"]:
                    seen.add(frame.get("engine", 0))
            if seen == {0, 1}:
                break


def test_an_engine_that_dies_costs_only_what_it_had_begun(server: ServeProcess) -> None:
    dead = engines(server)[0]
    replies = asyncio.run(load(server.address, 30, lambda: os.kill(dead, signal.SIGKILL)))
    # A first token may have no text yet: the engine had begun with it, and the client has seen nothing.
    unseen = [reply for reply in replies if reply.status == 500]
    assert all(reply.json()["error"]["code"] == "engine_dead" for reply in unseen)
    whole = sum(reply.status == 200 and (number % 3 == 0 or reply.complete) for number, reply in enumerate(replies))
    broken = sum(reply.status == 200 and number % 3 != 0 and not reply.complete and "error" in reply.events()[-1]
                 for number, reply in enumerate(replies)) + len(unseen)
    assert whole + broken == 30 and whole >= 15
    assert server.http.get("/health").status_code == 200  # the other one is well
    until(lambda: len(engines(server)) == 2 and server.metric("engine_restarts") == 1, PATIENCE)
    assert judge(asyncio.run(load(server.address, 12, lambda: None))) == (12, 0)


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size"):
        asyncio.run(ReplicatedLLM.start(65))
