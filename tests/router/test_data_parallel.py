"""`quire serve --data-parallel-size 2`: two engines behind one port, as one server to everybody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import ConfigError, EngineDeadError
from quire.router.engines import ReplicatedLLM, ReplicatedStream
from quire.router.load import Load
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
            if b"quire.engine.process.main" in Path(f"/proc/{child}/cmdline").read_bytes()]


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
    whole = sum(reply.status == 200 and (number % 3 == 0 or reply.complete) for number, reply in enumerate(replies))
    broken = sum(reply.status == 200 and number % 3 != 0 and not reply.complete and "error" in reply.events()[-1]
                 for number, reply in enumerate(replies))
    assert whole + broken == 30 and whole >= 15  # nobody gets an error who had seen nothing
    assert server.http.get("/health").status_code == 200  # the other one is well
    until(lambda: len(engines(server)) == 2 and server.metric("engine_restarts") == 1, PATIENCE)
    assert judge(asyncio.run(load(server.address, 12, lambda: None))) == (12, 0)


class _Engine:
    """Says what it is told to, and dies where it is told to."""

    def __init__(self, texts: list[str | None]) -> None:
        self._texts = iter(texts)

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def __anext__(self) -> Any:
        text = next(self._texts)
        if text is None:
            raise EngineDeadError("dead")
        return SimpleNamespace(outputs=[SimpleNamespace(text=text)], finished=text == "end")


@pytest.mark.parametrize(("first", "expected"), [
    ([None], ["", "b", "end"]),
    (["", "", None], ["", "b", "end"]),
    (["", "a", None], ["", "a", None]),
    ([*[""] * 6, None], [*[""] * 6, None]),
])
def test_a_request_moves_to_another_engine_until_it_has_text(first: list[str | None],
                                                             expected: list[str | None]) -> None:
    lives = [_Engine(first), _Engine(["", "b", "end"])]

    def choose(tried: set[int]) -> Any:
        return len(tried), lives[len(tried)], Load().send(1)

    async def read() -> list[str | None]:
        stream, found = ReplicatedStream("r", choose, lambda engine: engine), []
        try:
            while not found or found[-1] != "end":
                found.append((await anext(stream)).outputs[0].text)
        except EngineDeadError:
            found.append(None)
        return found

    assert asyncio.run(read()) == expected


def test_a_router_learns_what_the_engines_hold_together(tiny: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of two engines and a router")
    secret.chmod(0o600)
    with quire_serve(tiny, tmp_path / "log", "--executor", "dummy", "--load-format", "dummy", "--num-kv-blocks", "500",
                     "--data-parallel-size", "2", "--kv-secret-file", str(secret)) as server:
        for number in range(4):
            server.http.post("/v1/completions", json={"prompt": f"{number} {WORDS}", "max_tokens": 2})
        with server.http.stream("GET", "/v1/kv/events") as reply:
            lines = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))
            start, names = next(lines), set[str]()
            assert start["type"] == "start" and start["secret"] and start["block_size"] == 16
            while len(names) < 4 * 300 // start["block_size"]:
                found = next(lines)
                joined = found.get("names", "") + found.get("stored", "")
                names |= {joined[place:place + 32] for place in range(0, len(joined), 32)}


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size"):
        asyncio.run(ReplicatedLLM.start(65))
