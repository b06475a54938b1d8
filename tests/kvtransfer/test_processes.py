"""Either side is killed or stopped in the middle: the other notices, nothing is written late or left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kvtransfer.receiver import KVReceiver
from quire.kvtransfer.sender import KVSender
from quire.kvtransfer.transport.base import PeerLostError
from quire.kvtransfer.transports import TRANSPORTS, transport
from tests.kvtransfer.child import MODEL, SECRET, TABLE, TOKENS
from tests.kvtransfer.layouts import UNTOUCHED, fill, make_store

CHILD = Path(__file__).parent / "child.py"
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    missing = transport(request.param).missing()
    if missing is not None:
        pytest.skip(missing)
    return str(request.param)


@pytest.fixture
def start(name: str) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(role: str) -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, str(CHILD), role, name], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()
        child.wait(60)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def said(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout is not None
    found: dict[str, Any] = json.loads(child.stdout.readline())
    return found


def shared_files() -> set[str]:
    """What this process has open of shared memory."""
    found = set()
    for file in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{file}")
        except OSError:
            continue
        if "quire-kv" in target:
            found.add(target)
    return found


def mapped_arenas() -> int:
    gc.unfreeze()  # a command that ran in this process may have frozen what was garbage then
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:quire-kv")


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop(child: subprocess.Popen[str]) -> None:
    """Returns when every thread of it stands still."""
    os.kill(child.pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{child.pid}/task")
    until(lambda: all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for task in tasks.iterdir()))


def named_segments() -> set[str]:
    return {path for path in os.listdir("/dev/shm") if "quire" in path} if Path("/dev/shm").exists() else set()


def test_a_receiver_that_stops_or_dies_is_given_up_and_leaves_nothing(name: str, start: Start) -> None:
    segments, files, arenas = named_segments(), shared_files(), mapped_arenas()
    store = make_store(MODEL, 16, 16, tokens_last=True)
    child = start("receive")
    given = said(child)
    sender = KVSender(store, [given["address"]], SECRET, transports=[name], timeout=60.0)
    sender.send(given["ticket"], [TABLE], 0, TOKENS)
    stop(child)
    sender.timeout = 0.2
    with pytest.raises(PeerLostError):
        sender.send(given["ticket"], [TABLE], 0, TOKENS)
    sender.close()
    os.kill(child.pid, signal.SIGCONT)

    sender = KVSender(store, [given["address"]], SECRET, transports=[name], timeout=60.0)
    sender.send(given["ticket"], [TABLE], 0, TOKENS)
    child.kill()
    with pytest.raises(PeerLostError):
        while True:
            sender.send(given["ticket"], [TABLE], 0, TOKENS)
    child.wait(60)
    sender.close()
    with pytest.raises(PeerLostError):
        KVSender(store, [given["address"]], SECRET, transports=[name], timeout=60.0)
    if name == "shm":
        assert given["address"]["transports"]["shm"]["socket"] not in Path("/proc/net/unix").read_text()
        assert named_segments() <= segments
        del sender
        until(lambda: shared_files() <= files and mapped_arenas() <= arenas)


def test_a_sender_that_wakes_up_late_or_dies_does_no_harm(name: str, start: Start) -> None:
    arenas = mapped_arenas()  # other tests' engines, where one keeps its memory
    reader = make_store(MODEL, 16, 16, tokens_last=True)
    wanted = make_store(MODEL, 16, 16, tokens_last=True)
    fill(wanted, MODEL, [TABLE], TOKENS)
    receiver = KVReceiver(reader, SECRET, [name])
    whole = threading.Event()
    child = start("send")
    assert child.stdin is not None
    try:
        ticket = receiver.open(1, 1, [TABLE], [0], TOKENS, lambda start, end: None)
        tell(child, receiver, ticket)
        assert "sent" in said(child)
        stop(child)
        receiver.close(1)
        for raw in reader.raw:
            raw.fill_(5.0)
        receiver.open(1, 2, [TABLE], [0], TOKENS, lambda start, end: None)
        os.kill(child.pid, signal.SIGCONT)
        while "error" not in (last := said(child)):
            pass
        assert last["error"] == "StaleTransferError"
        assert all((raw == 5.0).all() for raw in reader.raw)

        receiver.close(1)
        for raw in reader.raw:
            raw.fill_(UNTOUCHED)
        again = receiver.open(1, 3, [TABLE], [0], TOKENS, lambda start, end: whole.set() if end == TOKENS else None)
        tell(child, receiver, again)
        assert "sent" in said(child) and whole.is_set()
        child.kill()
        child.wait(60)
        receiver.close(1)
        assert all(torch.equal(here, there) for here, there in zip(reader.raw, wanted.raw, strict=True))
        if name == "shm":
            until(lambda: mapped_arenas() <= arenas)
        third = receiver.open(2, 4, [TABLE], [0], TOKENS, lambda start, end: None)
        sender = KVSender(wanted, [receiver.address()], SECRET, transports=[name], timeout=60.0)
        sender.send(third, [TABLE], 0, TOKENS)
        sender.close()
    finally:
        receiver.stop()


def tell(child: subprocess.Popen[str], receiver: KVReceiver, ticket: dict[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps({"address": receiver.address(), "ticket": ticket}) + "\n")
    child.stdin.flush()
