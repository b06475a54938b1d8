"""A tied head that two stages compute together gives the logits of one, whoever helps and however late."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from quire.ops.cpu import CpuOps
from quire.parallel.shared_head import HEAD_BYTES, HeadHelper, HeadMemory, HeadOwner

ROWS = [1, 2, 7, 12, 13, 33, 64]
WEIGHTS = {
    "bfloat16": lambda n, k: torch.randn(n, k).bfloat16().float(),
    "float32": torch.randn,
}


@pytest.fixture
def head() -> Iterator[HeadMemory]:
    yield HeadMemory(memoryview(mmap.mmap(-1, HEAD_BYTES)))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("columns", [4096, 5003, 20000])
def test_logits_are_those_of_one_stage(head: HeadMemory, name: str, columns: int) -> None:
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(WEIGHTS[name](columns, 96))
    assert packed.format == name
    owner = HeadOwner(head, packed, lambda x, ctx, out: pytest.fail("it was not shared"))
    helper = HeadHelper(head, packed)
    try:
        for turn in range(3):
            for rows in ROWS:
                x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(turn * 100 + rows))
                assert torch.equal(owner.logits(x, None), ops.linear(x, packed))
    finally:
        helper.close()


def test_the_helper_does_part_of_it(head: HeadMemory) -> None:
    """With another table it gives other logits: so one sees which are its own."""
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.ones(60000, 64))
    helper = HeadHelper(head, ops.pack_linear(torch.full((60000, 64), 2.0)))
    owner = HeadOwner(head, packed, lambda x, ctx, out: pytest.fail("it was not shared"))
    try:
        until, seen = time.monotonic() + 20.0, {64.0}
        while len(seen) < 2 and time.monotonic() < until:
            seen |= set(owner.logits(torch.ones(32, 64), None).flatten().tolist())
        assert seen == {64.0, 128.0}
    finally:
        helper.close()


def test_without_a_helper_it_is_computed_alone(head: HeadMemory) -> None:
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.randn(8192, 64))
    x = torch.randn(5, 64)
    assert torch.equal(HeadOwner(head, packed, ops.linear).logits(x, None), ops.linear(x, packed))


def test_a_helper_that_took_a_piece_and_never_came_back_is_not_waited_for(head: HeadMemory) -> None:
    """Pieces are taken through memory: here by the test, which computes nothing."""
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.randn(40000, 64))
    owner = HeadOwner(head, packed, ops.linear)
    next_piece = torch.frombuffer(head.memory, dtype=torch.int64, count=8)[3:4]
    assert int(next_piece) == 0
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            now = int(next_piece)
            if now & 0xFFFFFFFF == 3:
                next_piece.fill_(now + 5)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        for rows in (1, 16, 64):
            x = torch.randn(rows, 64)
            assert torch.equal(owner.logits(x, None), ops.linear(x, packed))
    finally:
        stop.set()
        thread.join()


def test_too_many_rows_and_formats_of_integers_are_not_shared(head: HeadMemory) -> None:
    ops = CpuOps(num_threads=1)
    packed = ops.pack_linear(torch.randn(8192, 64))
    asked: list[int] = []

    def alone(x: torch.Tensor, ctx: object, out: torch.Tensor | None) -> torch.Tensor:
        asked.append(x.shape[0])
        return ops.linear(x, packed, None, out)

    owner = HeadOwner(head, packed, alone)
    for rows in (0, 64, 65, 200):
        owner.logits(torch.randn(rows, 64), None)
    assert asked == [0, 65, 200]
    small = ops.pack_linear(torch.randn(512, 64))
    HeadOwner(head, small, lambda x, ctx, out: asked.append(-1) or ops.linear(x, small)).logits(
        torch.randn(3, 64), None)
    assert asked[-1] == -1
