"""Ranks that are killed, stopped, cut off or never start: noticed soon, told once and clearly, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM
from quire.child import child_environment
from quire.errors import ConfigError, EngineDeadError, EngineError
from quire.parallel.place import Place
from quire.ranks.executor import RankExecutor
from quire.ranks.frames import FrameSocket, Kind
from quire.ranks.local import start_local
from quire.ranks.rank import Rank
from quire.ranks.start import RankStart
from quire.scheduler.plan import StepPlan
from tests.async_engines import greedy, last, run, until
from tests.ranks.processes import PATIENCE, alive, children, named_memory, ranks_of, until_gone

SLOW: dict[str, Any] = {"kind": "kv_hash", "num_blocks": 16, "block_size": 4, "step_seconds": 0.05}
NOTICED_SECONDS = 3.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, descriptors = set(children(os.getpid())), len(os.listdir("/proc/self/fd"))
    memory = named_memory()
    yield
    until_gone([pid for pid in children(os.getpid()) if pid not in before])
    assert named_memory() == memory
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def noticed(executor: RankExecutor, harm: Callable[[], None]) -> tuple[str, float]:
    """Steps are under way when something happens: what they end with, and how long after."""
    futures = [executor.submit(StepPlan(step)) for step in range(1, 4)]
    futures[0].result(PATIENCE)
    futures += [executor.submit(StepPlan(step)) for step in range(4, 200)]
    began = time.monotonic()
    harm()
    with pytest.raises(EngineDeadError) as caught:
        futures[-1].result(PATIENCE)
    assert all(future.done() for future in futures)
    assert executor.failure is not None
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("harm", ["kill", "stop", "cut"])
def test_a_lost_rank_ends_all_and_says_which_it_was(harm: str) -> None:
    executor, _ = start_local(Place.all(1, 2), SLOW)
    pids = [state.pid for state in executor.ranks.states]
    try:
        if harm == "cut":
            message, seconds = noticed(executor, executor.ranks.handles[1].link.cut)
            assert "connection" in message
        else:
            number = signal.SIGKILL if harm == "kill" else signal.SIGSTOP
            message, seconds = noticed(executor, lambda: os.kill(pids[1], number))
            assert ("SIGKILL" if harm == "kill" else "it was stopped") in message
        assert "rank 1 of 2" in message
        # Three seconds of a machine that has time for us; here others compute as well.
        assert seconds < 10 * NOTICED_SECONDS
        until_gone(pids)
    finally:
        executor.close()


def test_ranks_of_an_engine_that_is_killed_end_with_it_even_stopped_ones(tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(
        "import sys, time\n"
        "from quire.parallel.place import Place\n"
        "from quire.ranks.local import start_local\n"
        "executor, _ = start_local(Place.all(2, 1), {'kind': 'dummy', 'vocab_size': 9})\n"
        "print(*[state.pid for state in executor.ranks.states], flush=True)\n"
        "time.sleep(600)\n")
    engine = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True,
                              env=child_environment(PYTHONPATH=str(Path(__file__).parents[2])))
    try:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        engine.kill()
        engine.communicate()
    until_gone(pids)


def test_a_rank_that_fails_while_it_starts_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError, match=r"rank \d of 3.*there is no worker 'nonsense'"):
        start_local(Place.all(3, 1), {"kind": "nonsense"})
    assert sum("Traceback" in record.getMessage() for record in caplog.records) == 1


def test_a_rank_that_fails_when_its_engine_has_given_up_says_nothing() -> None:
    """Another has failed before: the engine has closed its connections, and wants no second reason."""
    ours, theirs = map(FrameSocket, socket.socketpair())
    left = threading.Event()
    ours.send(Kind.START, RankStart(Place(), {"kind": "nonsense"}, 1).to_json())
    ours.close()
    assert Rank(theirs, leave=left.set).run() == 1 and left.is_set()


def test_sizes_that_cannot_work_are_refused_before_a_process_is_started(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size") as caught:
        LLM(str(tiny_llama), tensor_parallel_size=7, device="cpu")
    assert caught.value.field == "tensor_parallel_size"
    assert not ranks_of(os.getpid())


def test_requests_in_flight_end_with_an_error_when_a_rank_dies(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), tensor_parallel_size=2, num_threads=1, device="cpu", skip_tokenizer_init=True) as llm:
        pids = ranks_of(os.getpid())
        for name in "ab":
            llm.add_request(name, [1, 2, 3], greedy(200))
        llm.step()
        os.kill(pids[0], signal.SIGKILL)
        ended = {}
        while llm.has_unfinished_requests():
            ended |= {output.request_id: output for output in llm.step() if output.finished}
        assert set(ended) == {"a", "b"}
        for output in ended.values():
            assert output.error is not None and "rank 0 of 2" in output.error and "SIGKILL" in output.error
        llm.add_request("c", [1], greedy(3))
        (late,) = llm.step()
        assert late.error is not None and "rank 0 of 2" in late.error


def test_a_served_engine_comes_back_with_new_ranks(tiny_llama: Path) -> None:
    """Whatever happens to a rank, while requests run or none does, the next ones are answered."""

    async def job(llm: AsyncLLM) -> None:
        first = await last(llm.generate([5, 6], greedy(8)))
        for harm, busy in ((signal.SIGSTOP, True), (signal.SIGKILL, False)):
            assert llm.engine_pid is not None
            engine, ranks = llm.engine_pid, ranks_of(llm.engine_pid)
            assert len(ranks) == 2
            stream = llm.generate([1, 2], greedy(240))
            if busy:
                await anext(stream)
            os.kill(ranks[1], harm)
            if busy:
                with pytest.raises(EngineDeadError, match="rank 1 of 2"):
                    await last(stream)
            await until(lambda before=engine: llm.engine_pid not in (None, before), PATIENCE)  # type: ignore[misc]
            await until(lambda: _healthy(llm), PATIENCE)
            until_gone([engine, *ranks])
            again = await last(llm.generate([5, 6], greedy(8)))
            assert again.outputs[0].token_ids == first.outputs[0].token_ids

    run(job, tiny_llama, pipeline_parallel_size=2, skip_tokenizer_init=True)


async def _healthy(llm: AsyncLLM) -> bool:
    try:
        await llm.check_health()
    except EngineDeadError:
        return False
    return True


@pytest.mark.parametrize("option", [
    {"kv_disk": "/tmp/kv:1GiB", "distributed_executor_backend": "ray"},
    {"kv_role": "decode", "distributed_executor_backend": "ray"},
    {"executor": "dummy", "dummy_script": "texts.jsonl"},
])
def test_what_ranks_cannot_do_is_refused_by_name(tiny_llama: Path, option: dict[str, Any],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", "a secret of the tests, long enough")
    with pytest.raises(ConfigError) as caught:
        LLM(str(tiny_llama), tensor_parallel_size=2, device="cpu", **option)
    assert caught.value.field in ("kv_disk", "kv_role", "dummy_script") and caught.value.field in option


def test_ranks_of_an_engine_that_cannot_be_put_together_are_ended(tiny_llama: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise EngineError("no cache today")

    monkeypatch.setattr("quire.engine.assembly.engine.build_cache", broken)
    with pytest.raises(EngineError, match="no cache today"):
        LLM(str(tiny_llama), tensor_parallel_size=2, executor="dummy", skip_tokenizer_init=True)
    assert not ranks_of(os.getpid())
