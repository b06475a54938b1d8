"""Real servers behind a router, killed under load: who had sent nothing is answered by another, the others are told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench.serving.http_client import Reply, ask
from quire.router.replica import State
from tests.router.fakes import routed
from tests.server.conftest import tiny as tiny
from tests.server.real import PATIENCE, ServeProcess, quire_serve, until

TOKENS = 60


@pytest.fixture(scope="module")
def servers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServeProcess]]:
    """Those that a test leaves behind are well; the last test leaves one dead."""
    folder = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(quire_serve(tiny, folder / f"log{number}", "--executor", "dummy", "--load-format",
                                               "dummy", "--dummy-step-ms", "20", "--max-num-seqs", "4"))
               for number in range(3)]


def body(number: int) -> dict[str, Any]:
    return {"prompt": f"prompt {number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": number % 3 != 0}


async def load(address: str, number: int, kill: Any) -> list[Reply]:
    """Requests all at once; `kill` is called when some have begun to answer."""
    begun = asyncio.Event()
    work = [asyncio.create_task(ask(address, "/v1/completions", body(each), timeout=PATIENCE,
                                    on_piece=lambda _: begun.set())) for each in range(number)]
    await begun.wait()
    kill()
    return await asyncio.gather(*work)


def judge(replies: list[Reply]) -> tuple[int, int]:
    """(answered to the end, broken off with an error in the stream); anything else is a failure."""
    whole = broken = 0
    for number, reply in enumerate(replies):
        assert reply.status == 200, reply.body
        if number % 3 == 0:
            assert reply.json()["usage"]["completion_tokens"] == TOKENS
            whole += 1
        elif reply.complete:
            assert sum(len(event["choices"]) for event in reply.events()) > 0
            whole += 1
        else:
            last = reply.events()[-1]
            assert "error" in last and len(reply.events()) > 1, "it had sent nothing"
            broken += 1
    return whole, broken


def test_an_engine_that_is_killed_costs_its_server_a_pause(servers: list[ServeProcess]) -> None:
    with routed([each.address for each in servers], policy="least-loaded") as (address, service):
        whole, broken = judge(asyncio.run(load(address, 36, servers[1].kill_engine)))
        assert whole + broken == 36 and whole >= 24
        until(lambda: all(each.available for each in service.fleet), PATIENCE)
        assert judge(asyncio.run(load(address, 9, lambda: None))) == (9, 0)


def test_a_server_that_is_stopped_is_left_like_a_dead_one(servers: list[ServeProcess]) -> None:
    pid = servers[2].process.pid
    with routed([each.address for each in servers], policy="least-loaded", health_timeout=1.0) as (address, service):
        try:
            whole, broken = judge(asyncio.run(load(address, 18, lambda: os.kill(pid, signal.SIGSTOP))))
            assert whole + broken == 18 and whole >= 12
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: all(each.available for each in service.fleet), PATIENCE)
        assert judge(asyncio.run(load(address, 9, lambda: None))) == (9, 0)


def test_a_server_that_is_killed_under_load_loses_only_what_it_had_begun(servers: list[ServeProcess]) -> None:
    with routed([each.address for each in servers], policy="least-loaded") as (address, service):
        dead, *others = service.fleet
        replies = asyncio.run(load(address, 36, servers[0].process.kill))
        servers[0].process.wait(PATIENCE)
        whole, broken = judge(replies)
        assert whole + broken == 36 and whole >= 24 and service.metrics.retries >= 1
        until(lambda: dead.state is State.DOWN)
        sent = dead.load.sent
        judge(asyncio.run(load(address, 9, lambda: None)))
        assert dead.load.sent == sent, "somebody was sent to a dead server"
        until(lambda: not any(each.load.in_flight for each in service.fleet) and not service.active)
        assert {each.state for each in others} == {State.UP}
