"""An engine that dies, hangs or breaks fails what is in flight at once, and is there again for what comes later."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, SamplingParams
from quire.engine.front.client import EngineClient
from quire.engine.process.messages import Heartbeat
from quire.engine.process.pulse import PhaseClock, ProcessorWait
from quire.errors import ConfigError, EngineDeadError, ModelLoadError
from tests.async_engines import greedy, last, run, until

LONG = greedy(4000)
SLOW: dict[str, Any] = {"executor": "dummy", "dummy_step_ms": 5.0, "skip_tokenizer_init": True}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's, which pytest's own may not."""
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as name:
        yield Path(name)


async def in_flight(llm: AsyncLLM, count: int) -> list[asyncio.Task[Any]]:
    """Requests of which each has brought tokens and has long to go."""
    streams = [llm.generate([1, 2, i], LONG) for i in range(count)]
    for stream in streams:
        await anext(stream)
    return [asyncio.create_task(last(stream)) for stream in streams]


async def all_lost(tasks: list[asyncio.Task[Any]], within: float) -> list[BaseException]:
    async with asyncio.timeout(within):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, EngineDeadError) for each in found), found
    return found


async def healthy(llm: AsyncLLM) -> bool:
    try:
        await llm.check_health()
    except EngineDeadError:
        return False
    return True


async def unwell(llm: AsyncLLM) -> bool:
    return not await healthy(llm)


async def serves_again(llm: AsyncLLM) -> None:
    await until(lambda: healthy(llm))
    assert len((await last(llm.generate([5], greedy(3)))).outputs[0].token_ids) == 3


def test_a_killed_engine_fails_what_is_in_flight_at_once_and_comes_back(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        for round in range(1, 3):
            tasks = await in_flight(llm, 5)
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)
            errors = await all_lost(tasks, within=30.0)
            assert "SIGKILL" in str(errors[0])
            with pytest.raises(EngineDeadError, match="restarting") as caught:
                await llm.check_health()
            assert caught.value.retry_after is not None
            with pytest.raises(EngineDeadError):
                await llm.generate([1], LONG).start()
            metrics = await llm.metrics()
            assert metrics["requests_running"] == metrics["kv_blocks_used"] == 0
            await serves_again(llm)
            metrics = await llm.metrics()
            assert metrics["engine_restarts"] == round and metrics["requests_lost"] == 5 * round

    run(job, smollm2, **SLOW)


def test_a_stopped_engine_is_found_out_and_replaced(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        tasks = await in_flight(llm, 3)
        stuck = llm.engine_pid
        assert stuck is not None
        os.kill(stuck, signal.SIGSTOP)
        errors = await all_lost(tasks, within=9.0)  # sooner than by silence alone
        assert "was stopped" in str(errors[0])
        await serves_again(llm)
        assert not Path(f"/proc/{stuck}").exists()

    run(job, smollm2, **SLOW)


def test_a_silent_engine_is_found_out_whatever_the_reason(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineClient, "stopped", False)

    async def job(llm: AsyncLLM) -> None:
        (task,) = await in_flight(llm, 1)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGSTOP)
        await until(lambda: unwell(llm))
        assert not task.done()  # there is still hope
        errors = await all_lost([task], within=20.0)
        assert "no sign of life" in str(errors[0])
        await serves_again(llm)

    run(job, smollm2, heartbeat_timeout=3.0, **SLOW)


def test_an_engine_that_was_stopped_for_a_moment_goes_on(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        stream = llm.generate([1], greedy(200))
        await anext(stream)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGSTOP)
        await asyncio.sleep(0.6)
        os.kill(llm.engine_pid, signal.SIGCONT)
        assert len((await last(stream)).outputs[0].token_ids) == 200
        assert (await llm.metrics())["engine_restarts"] == 0

    run(job, smollm2, **SLOW)


def test_a_step_that_does_not_end_is_death_though_the_process_lives(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        await asyncio.sleep(1.5)
        await llm.check_health()  # idle for longer than a step may take, and well
        with pytest.raises(EngineDeadError, match="a step has been running"):
            await last(llm.generate([1], LONG))
        await until(lambda: healthy(llm))

    run(job, smollm2, executor="dummy", dummy_step_ms=60_000.0, skip_tokenizer_init=True, step_timeout=1.0)


def test_an_engine_that_cannot_start_says_why() -> None:
    async def nothing(llm: AsyncLLM) -> None:
        raise AssertionError("it started")

    with pytest.raises(ModelLoadError, match="there is no model"):
        run(nothing, "no-such-model")
    with pytest.raises(ConfigError, match="max_model_len") as caught:
        run(nothing, "smollm2-135m", executor="dummy", max_model_len=10**6)
    assert caught.value.field == "max_model_len"
    with pytest.raises(ConfigError, match="unknown option 'blocksize'"):
        run(nothing, "smollm2-135m", blocksize=3)
    with pytest.raises(ConfigError, match="heartbeat_timeout"):
        run(nothing, "smollm2-135m", heartbeat_timeout=0.0)


def test_an_engine_killed_while_it_restarts_is_restarted_again(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        first = llm.engine_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: llm.engine_pid != first)
        assert llm.engine_pid is not None and llm.state == "restarting"
        os.kill(llm.engine_pid, signal.SIGKILL)
        await serves_again(llm)
        assert (await llm.metrics())["engine_restarts"] == 2

    run(job, smollm2, **SLOW)


def test_restarts_are_bounded(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        for _ in range(3):
            await until(lambda: healthy(llm))
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)
            await until(lambda: llm.state != "ready")
        await until(lambda: llm.state == "failed", seconds=1.0)
        assert (await llm.metrics())["engine_restarts"] == 2
        with pytest.raises(EngineDeadError, match="failed for good"):
            await llm.generate([1], LONG).start()

    run(job, smollm2, max_restarts=2, **SLOW)


def test_without_its_parent_the_engine_ends(short_folder: Path, smollm2: str) -> None:
    script = """
import asyncio, sys
from quire import AsyncLLM, SamplingParams
async def main():
    llm = await AsyncLLM.start("smollm2-135m", executor="dummy", dummy_step_ms=5.0)
    stream = llm.generate([1], SamplingParams(max_tokens=4000, ignore_eos=True))
    await anext(stream)
    print(llm.engine_pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3],
                              env={**os.environ, "TMPDIR": str(short_folder)})
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.05)
    assert not list(short_folder.glob("quire-*"))


def test_signals_meant_for_the_server_do_not_end_the_engine(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        (task,) = await in_flight(llm, 1)
        assert llm.engine_pid is not None
        for signalled in (signal.SIGINT, signal.SIGTERM):
            os.kill(llm.engine_pid, signalled)
        await asyncio.sleep(0.3)
        await llm.check_health()
        assert not task.done()
        task.cancel()

    run(job, smollm2, **SLOW)


def test_shutdown_drains(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        short, long = (asyncio.create_task(last(llm.generate([1], greedy(n)))) for n in (60, 4000))
        await until(lambda: llm.num_in_flight == 2)
        pid = llm.engine_pid
        ending = asyncio.create_task(llm.shutdown(drain_seconds=3.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await llm.generate([1], greedy(1)).start()
        assert len((await short).outputs[0].token_ids) == 60
        with pytest.raises(EngineDeadError, match="shut down before"):
            await long
        await ending
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(EngineDeadError):
            await llm.check_health()

    run(job, smollm2, **SLOW)


def test_nothing_is_left_behind(smollm2: str, short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))

    async def job(llm: AsyncLLM) -> None:
        (folder,) = short_folder.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        await last(llm.generate([1], SamplingParams(max_tokens=2)))

    run(job, smollm2, executor="dummy", skip_tokenizer_init=True)
    assert not list(short_folder.iterdir())


def test_a_heartbeat_of_the_start_that_comes_late_does_not_hide_a_silent_engine(
    smollm2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineClient, "stopped", False)

    async def job(llm: AsyncLLM) -> None:
        (task,) = await in_flight(llm, 1)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        client = llm._desk.supervisor._client
        assert client is not None
        client.heartbeat = Heartbeat("starting", time.monotonic(), 0)
        assert "no sign of life" in str((await all_lost([task], within=20.0))[0])

    run(job, smollm2, heartbeat_timeout=4.0, **SLOW)


def test_a_step_is_stuck_by_the_engine_s_own_word_not_because_that_is_old(smollm2: str) -> None:
    async def job(llm: AsyncLLM) -> None:
        supervisor = llm._desk.supervisor
        client = supervisor._client
        assert client is not None
        now = time.monotonic()
        # Its next heartbeat is held up, or lies unread: steps go on meanwhile.
        client.heartbeat = Heartbeat("stepping", now - 100.0, 7, 0.4)
        assert supervisor._complaint(client) is None
        supervisor.check()
        client.heartbeat = Heartbeat("stepping", now - 100.0, 7, 3.0)
        assert "a step has been running for 3 seconds" in str(supervisor._complaint(client))
        with pytest.raises(EngineDeadError, match="no progress"):
            supervisor.check()
        client.heartbeat = Heartbeat("idle", now - 100.0, 7, 100.0)
        assert supervisor._complaint(client) is None

    run(job, smollm2, step_timeout=2.0, **SLOW)


def test_waiting_for_a_processor_is_no_part_of_a_step(tmp_path: Path) -> None:
    def threads(**waited: float) -> None:
        for name, seconds in waited.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "schedstat").write_text(f"123 {int(seconds * 1e9)} 4\n")

    threads(a=1.0, b=5.0)
    clock = PhaseClock(ProcessorWait(tmp_path))
    assert clock.spent(10.0, 10.5) == 0.5
    threads(a=1.25, b=5.5)  # side by side: half a second passed without a processor
    assert clock.spent(10.0, 11.5) == 1.0
    threads(a=2.0)
    assert clock.spent(10.0, 12.5) == 1.25
    assert clock.spent(12.4, 12.6) == pytest.approx(0.2), "another step begins anew"
    assert clock.spent(12.4, 72.4) == pytest.approx(60.0), "who sleeps does not wait for a processor"
    assert PhaseClock(ProcessorWait(tmp_path / "none")).spent(1.0, 3.0) == 2.0
