"""Collectives between processes: what arrives is what was sent, and nobody waits for one who is gone."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quire.errors import EngineError, RankLostError
from quire.kernels.slices import RankTree, add_in_tree
from quire.parallel import shared
from quire.parallel.collectives import Link, TensorGroup
from quire.parallel.over_links import LinkGroup, SocketLink
from quire.parallel.shared import SharedGroup, SharedLink, abort, shared_group_bytes, shared_link_bytes
from tests.parallel_ranks.rank_threads import side_by_side

SLOT = 4096
"""Small, so that most exchanges need several rounds."""


def shared_groups(size: int) -> list[TensorGroup]:
    memory = mmap.mmap(-1, shared_group_bytes(size, SLOT))
    return [SharedGroup(memory, rank, size, timeout=60.0, slot_bytes=SLOT) for rank in range(size)]


def socket_groups(size: int) -> list[TensorGroup]:
    import socket

    to: list[dict[int, Link]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            one, other = socket.socketpair()
            to[low][high], to[high][low] = SocketLink(one, 60.0), SocketLink(other, 60.0)
    return [LinkGroup(rank, size, to[rank], to[rank]) for rank in range(size)]


GROUPS: list[Callable[[int], list[TensorGroup]]] = [shared_groups, socket_groups]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_get_what_the_others_gave(groups: Callable[[int], list[TensorGroup]], size: int) -> None:
    """Lengths differ between ranks and rounds, and may be nothing or more than a slot."""
    draw = random.Random(size)
    rounds = [[torch.randn(draw.choice([0, 1, 7, 500, 1022, 1023, 5000])) for _ in range(size)] for _ in range(30)]
    everybody = groups(size)

    def run(rank: int) -> None:
        for given in rounds:
            found = everybody[rank].exchange(given[rank])
            assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))
            assert everybody[rank].broadcast(b"said by the first" if rank == 0 else None) == b"said by the first"
        largest = everybody[rank].maximum(torch.tensor([float(rank), -float(rank)]))
        assert largest.tolist() == [size - 1, 0]

    side_by_side([lambda rank=rank: run(rank) for rank in range(size)])
    for group in everybody:
        group.close()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("total", "size"), [(9, 2), (9, 4), (8, 3), (32, 5), (14, 8)])
def test_the_tree_is_finished_as_one_rank_would(groups: Any, total: int, size: int) -> None:
    rows, width = 5, 8
    slices = torch.randn(total, rows, width)
    bias, residual = torch.randn(width), torch.randn(rows, width)
    tree, everybody = RankTree.even(total, size), groups(size)

    def run(rank: int) -> torch.Tensor:
        group, own = everybody[rank], tree.nodes(rank)
        for _ in range(3):
            room = group.room(len(own) * rows, width)
            nodes = torch.stack([add_in_tree(list(slices[low:high])) for low, high in own])
            if room is not None:
                nodes = room.view(nodes.shape).copy_(nodes)
            found: torch.Tensor = group.sum_nodes(nodes, tree, bias, residual)
            out = torch.zeros(rows, size) if rank == 0 else None
            group.gather(slices[0, :, rank : rank + 1].contiguous(), [1] * size, out)
            assert out is None or torch.equal(out, slices[0, :, :size])
        return found

    for found in side_by_side([lambda rank=rank: run(rank) for rank in range(size)]):
        assert torch.equal(found, add_in_tree(list(slices)) + bias + residual)


def test_a_link_carries_bytes_in_order_whatever_the_pieces() -> None:
    memory = mmap.mmap(-1, shared_link_bytes(1000))
    sender, receiver = SharedLink(memory, sends=True), SharedLink(memory, sends=False)
    draw = random.Random(3)
    data = draw.randbytes(100_000)

    def send() -> bytes:
        at = 0
        while at < len(data):
            count = draw.choice([0, 1, 100, 999, 1000, 1001, 5000])
            sender.send(memoryview(data[at : at + count]))
            at += count
        return b""

    def receive() -> bytes:
        found = bytearray(len(data))
        pieces = random.Random(4)
        at = 0
        while at < len(data):
            count = min(pieces.choice([0, 1, 77, 1000, 3000]), len(data) - at)
            receiver.receive(memoryview(found)[at : at + count])
            at += count
        return bytes(found)

    assert side_by_side([send, receive])[1] == data
    with pytest.raises(EngineError, match="receives"):
        receiver.send(memoryview(b"x"))
    with pytest.raises(EngineError, match="sends"):
        sender.receive(memoryview(bytearray(1)))


def test_memory_that_is_too_small_or_read_only_is_refused() -> None:
    with pytest.raises(EngineError, match="shared memory"):
        SharedGroup(mmap.mmap(-1, 4096), 0, 2)
    with pytest.raises(EngineError, match="too small"):
        SharedLink(mmap.mmap(-1, 100), sends=True)
    with pytest.raises(EngineError, match="bytes"):
        shared_groups(2)[0].rows_at_once(SLOT + 1)


def test_a_rank_goes_on_spinning_for_one_that_has_more_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait longer than spinning lasts, but short beside what was computed before, is no reason to sleep sooner; one
    that is long beside it is."""
    monkeypatch.setattr(shared, "_spin_ns", lambda processes: 1_000_000)
    memory = mmap.mmap(-1, shared_group_bytes(2, SLOT))
    waits, late = (SharedGroup(memory, rank, 2, timeout=60.0, slot_bytes=SLOT) for rank in range(2))

    def give(group: SharedGroup, seconds: float) -> None:
        time.sleep(seconds)
        group.exchange(torch.ones(1))

    def exchange(waits_after: float, late_after: float) -> int:
        side_by_side([partial(give, waits, waits_after), partial(give, late, late_after)])
        return int(waits._group.spin_ns)

    exchange(0.0, 0.01)  # from here on it knows how long it computes
    waits._group.spin_ns = 1_000_000
    assert [exchange(1.2, 1.25) for _ in range(2)] == [1_000_000, 1_000_000]
    assert exchange(0.0, 0.2) == 500_000
    assert exchange(1.2, 1.25) == 1_000_000


def test_logits_of_a_decoding_batch_are_one_exchange() -> None:
    """Else the head is read several times: here two ranks of Qwen3 with 32 sequences."""
    memory = mmap.mmap(-1, shared_group_bytes(2))
    assert SharedGroup(memory, 0, 2).rows_at_once(4 * 151936 // 2) >= 32


def test_a_timeout_and_an_abort_end_the_waiting() -> None:
    memory = mmap.mmap(-1, shared_group_bytes(2, SLOT))
    with pytest.raises(RankLostError, match="in time"):
        SharedGroup(memory, 0, 2, timeout=0.05, slot_bytes=SLOT).exchange(torch.ones(3))
    memory = mmap.mmap(-1, shared_group_bytes(2, SLOT))
    group = SharedGroup(memory, 0, 2, slot_bytes=SLOT)
    timer = threading.Timer(0.05, abort, (memory,))
    timer.start()
    with pytest.raises(RankLostError, match="told to stop"):
        group.exchange(torch.ones(3))
    timer.join()
    with pytest.raises(RankLostError, match="told to stop"):  # and so does every call after it
        group.exchange(torch.ones(3))
    assert group.waited_ns > 0


RANK = """
import mmap, sys, torch
from quire.parallel.shared import SharedGroup
fd, rank, size = map(int, sys.argv[1:4])
group = SharedGroup(mmap.mmap(fd, 0), rank, size, slot_bytes=4096)
torch.manual_seed(7)
for step in range(int(sys.argv[4])):
    parts = [torch.randn(int(torch.randint(0, 3000, ()))) for _ in range(size)]
    found = group.exchange(parts[rank])
    assert all(torch.equal(a, b) for a, b in zip(found, parts)), step
    if step == 3:
        print("running", flush=True)
print("done", flush=True)
"""


def start_ranks(fd: int, size: int, steps: int) -> list[subprocess.Popen[str]]:
    return [subprocess.Popen([sys.executable, "-c", RANK, str(fd), str(rank), str(size), str(steps)],
                             pass_fds=[fd], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(size)]


def group_memory(size: int) -> int:
    fd = os.memfd_create("quire-test")
    os.ftruncate(fd, shared_group_bytes(size, SLOT))
    return fd


def test_processes_exchange_though_there_are_more_of_them_than_cores() -> None:
    size = len(os.sched_getaffinity(0)) + 1 if len(os.sched_getaffinity(0)) < 4 else 4
    fd = group_memory(size)
    ranks = start_ranks(fd, size, 100)
    os.close(fd)
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0 and "done" in out, err


def test_whoever_waits_for_a_killed_rank_is_told() -> None:
    fd = group_memory(2)
    first, second = start_ranks(fd, 2, 10_000_000)
    os.close(fd)
    try:
        assert first.stdout is not None and first.stdout.readline() == "running\n"
        second.send_signal(signal.SIGKILL)
        second.wait(timeout=60)
        began = time.monotonic()
        _, err = first.communicate(timeout=60)
        assert first.returncode == 1 and "RankLostError" in err and "its process is gone" in err
        assert time.monotonic() - began < 30  # some milliseconds, on a machine that is not busy
    finally:
        for rank in (first, second):
            rank.kill()
            rank.communicate()
