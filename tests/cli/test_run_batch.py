"""`quire run-batch`: every request answered once, also when it is killed in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.cli.conftest import PATIENCE, Done, command, environment
from tests.client.stub import Stub
from tests.client.stub import serving as serving


def write_batch(path: Path, count: int, max_tokens: int = 60) -> None:
    path.write_text("".join(json.dumps(
        {"custom_id": f"q{i}", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": f"number {i}", "max_tokens": max_tokens, "ignore_eos": True, "seed": i}}) + "\n"
        for i in range(count)))


def test_a_batch_that_is_killed_goes_on_and_does_nothing_twice(tmp_path: Path, tiny: Path) -> None:
    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(questions, 40)
    words = command("run-batch", "-i", str(questions), "-o", str(answers), "--model", str(tiny), "--load-format",
                    "dummy", "--num-threads", "1", "--max-concurrency", "2")
    running = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + PATIENCE
    while not answers.exists() or answers.read_bytes().count(b"\n") < 3:
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    before = answers.read_bytes().rpartition(b"\n")[0] + b"\n"
    assert before.count(b"\n") < 40
    again = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode == 0 and "have an answer already" in again.stderr
    assert answers.read_bytes().startswith(before)
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(one["custom_id"] for one in found) == sorted(f"q{i}" for i in range(40))
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 60 for one in found)


def test_a_busy_server_is_asked_again(tmp_path: Path, serving: Callable[..., Stub]) -> None:
    asked: dict[str, int] = {}

    async def busy(body: dict[str, Any]) -> AsyncIterator[Any]:
        asked[body["prompt"]] = asked.get(body["prompt"], 0) + 1
        if asked[body["prompt"]] < 3 and body["prompt"] == "number 1":
            yield 503, {"error": {"message": "restarting"}}
        yield {"id": "cmpl-1", "choices": [{"text": "x"}]}

    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(questions, 3)
    assert main(["run-batch", "-i", str(questions), "-o", str(answers), "--url", serving(busy).url]) == 0
    assert asked == {"number 0": 1, "number 1": 3, "number 2": 1}
    assert all(json.loads(line)["error"] is None for line in answers.read_text().splitlines())


@pytest.mark.parametrize(("words", "says"), [
    (("-i", "missing.jsonl", "-o", "out"), "cannot read the batch"),
    (("-i", "same", "-o", "same"), "the output file is the input file"),
    (("-i", "a", "-o", "b", "--max-concurrency", "0"), "--max-concurrency must be at least 1"),
    (("-i", "a", "-o", "b", "--url", "localhost:1", "--max-num-seqs", "2"), "for the server to decide"),
])
def test_mistakes_are_one_line(inside: Callable[..., Done], words: tuple[str, ...], says: str) -> None:
    done = inside("run-batch", *words)
    assert done.code == 1 and says in done.err and done.err.count("\n") == 1


def test_a_server_that_goes_away_ends_the_run_and_loses_nothing(
    tmp_path: Path, serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str]
) -> None:
    async def fine(body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"id": "cmpl-1", "choices": [{"text": "x"}]}

    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(questions, 3)
    words = ["run-batch", "-i", str(questions), "-o", str(answers), "--tries", "1", "--model-name", "m", "--url"]
    assert main([*words, "http://127.0.0.1:9"]) == 1
    assert "goes on from here" in capsys.readouterr().err and answers.read_text() == ""
    assert main([*words, serving(fine).url]) == 0
    assert len(answers.read_text().splitlines()) == 3


def test_a_line_that_a_server_turned_down_is_done_again(tmp_path: Path, serving: Callable[..., Stub]) -> None:
    broken = True

    async def mending(body: dict[str, Any]) -> AsyncIterator[Any]:
        if broken and body["prompt"] == "number 1":
            yield 503, {"error": {"message": "restarting"}}
        yield {"id": "cmpl-1", "choices": [{"text": "x"}]}

    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(questions, 3)
    words = ["run-batch", "-i", str(questions), "-o", str(answers), "--tries", "1", "--url", serving(mending).url]
    assert main(words) == 1
    broken = False
    assert main(words) == 0
    statuses = [json.loads(line)["response"]["status_code"] for line in answers.read_text().splitlines()]
    assert statuses == [200, 200, 200]


def test_refused_lines_are_told_by_the_exit_code_and_a_summary_and_the_others_are_answered(
    tmp_path: Path, serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str]
) -> None:
    async def picky(body: dict[str, Any]) -> AsyncIterator[Any]:
        if body["prompt"] == "number 1":
            yield 400, {"error": {"message": "too long by half"}}
        yield {"id": "cmpl-1", "choices": [{"text": "x"}]}

    questions, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(questions, 3)
    stub = serving(picky)
    words = ["run-batch", "-i", str(questions), "-o", str(answers), "--url", stub.url]
    for _ in range(2):  # a second run asks nothing, and says the same
        assert main(words) == 1
        told = capsys.readouterr().err
        assert "2 answered, 1 failed" in told and "q1, with 400: too long by half" in told
    assert len(stub.bodies) == 3
    codes = {one["custom_id"]: one["response"]["status_code"] for one in map(json.loads, answers.open())}
    assert codes == {"q0": 200, "q1": 400, "q2": 200}
