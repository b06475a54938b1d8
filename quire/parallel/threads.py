"""Ranks that are threads of one process: for tests, where a step's bits are compared and nothing is to be fast."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from quire.errors import RankLostError
from quire.parallel.collectives import Collectives, Link, TensorGroup
from quire.parallel.place import Place

PATIENCE = 120.0
"""Seconds that a thread waits for the others; one that failed breaks the barrier and ends their waiting at once."""


class _Table:
    """Where the threads of a group put what they give."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Tensor] = [torch.empty(0)] * size


class ThreadGroup(TensorGroup):
    """One thread's side of a group."""

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._table = table

    def exchange(self, mine: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        self._table.given[self.rank] = mine.reshape(-1).clone()
        self._wait()
        found = list(self._table.given)
        self._wait()  # so that nobody puts down the next before all have this one
        return found

    def _wait(self) -> None:
        try:
            self._table.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise RankLostError(f"tensor rank {self.rank} waited for others that have failed") from None

    def close(self) -> None:
        self._table.barrier.abort()


class QueueLink(Link):
    """One direction between two threads."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._rest = b""

    def send(self, data: memoryview) -> None:
        self._queue.put(bytes(data))

    def receive(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            if not self._rest:
                self._rest = self._queue.get(timeout=PATIENCE)
            count = min(len(into) - done, len(self._rest))
            into[done : done + count] = self._rest[:count]
            self._rest, done = self._rest[count:], done + count


def thread_collectives(tensor_size: int, num_stages: int) -> list[Collectives]:
    """One for each of `Place.all(tensor_size, num_stages)`."""
    tables = [_Table(tensor_size) for _ in range(num_stages)]
    # The link that leads to a stage, for each tensor rank.
    links = [[QueueLink() for _ in range(tensor_size)] for _ in range(num_stages)]
    found = []
    for place in Place.all(tensor_size, num_stages):
        rank, stage = place.tensor_rank, place.stage
        group = ThreadGroup(tables[stage], rank, tensor_size) if tensor_size > 1 else None
        if num_stages == 1:
            found.append(Collectives(group))
        else:
            found.append(Collectives(group, links[stage][rank], links[(stage + 1) % num_stages][rank]))
    return found
