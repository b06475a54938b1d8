"""How ranks wait for each other on the device: by kernels that watch counters, or by the stream itself.

Ranks that have a GPU each wait in a kernel: that is soonest, ends by itself when the other does not come, and counts
how long it took. Ranks that share a GPU wait in the stream (`cuStreamWaitValue32`): without MPS a GPU runs one process
at a time, and one that waits in a kernel keeps the other out until its share of time is over (H200, two processes:
2.2 ms for each wait in a kernel, 8 us in the stream). Both can be part of a captured graph.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.errors import RankLostError
from quire.parallel.cuda_memory import SharedDeviceMemory, call

PATIENCE = 300.0
"""Seconds that a rank waits for another, which may be compiling kernels."""
_TIMED_OUT, _STOPPED = 1, 2
_LINE = 64
"""Bytes between two flags."""
_EQUAL = 1
_LOOK_SECONDS = 1.0
_RELEASE_SECONDS = 0.001


class DeviceWaits(ABC):
    """The waits of one rank. All of them end with an error when another rank does not come."""

    def __init__(self, device: torch.device, patience: float = PATIENCE) -> None:
        self.device = device
        self.patience = patience

    @abstractmethod
    def meeting(self, rank: int, memories: Sequence[SharedDeviceMemory]) -> Callable[[int], None]:
        """Launches a wait for all tensor ranks, of which each has such a memory; its argument alternates between 0
        and 1."""

    @abstractmethod
    def sending(self, memory: SharedDeviceMemory) -> tuple[Callable[[], None], Callable[[], None]]:
        """Launch a wait until `memory`, this rank's own, has been read; and say that it was written."""

    @abstractmethod
    def receiving(self, memory: SharedDeviceMemory) -> tuple[Callable[[], None], Callable[[], None]]:
        """Launch a wait until `memory`, the sender's, has been written; and say that it was read."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around whatever waits for the device on the host: ends with RankLostError if another rank did not come."""
        yield
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Raise if a wait has ended without the other rank: what was computed since is worthless."""

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that the device has waited, where they are counted."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """End all waits. Idempotent."""


class KernelWaits(DeviceWaits):
    """By `kernels/triton/meeting.py`."""

    def __init__(self, device: torch.device, patience: float = PATIENCE) -> None:
        from quire.kernels.triton import meeting

        super().__init__(device, patience)
        self._kernels = meeting
        self._state = torch.zeros(meeting.STATE_WORDS, dtype=torch.int64, pin_memory=True)

    def _counter(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.device)

    def meeting(self, rank: int, memories: Sequence[SharedDeviceMemory]) -> Callable[[int], None]:
        flags, counter = _words(memories[rank], 0, len(memories)), self._counter()
        peers = torch.tensor([each.address for each in memories], dtype=torch.int64, device=self.device)
        return lambda turn: self._kernels.meet(peers, flags, counter, self._state, rank, self.patience)

    def sending(self, memory: SharedDeviceMemory) -> tuple[Callable[[], None], Callable[[], None]]:
        written, read, counter = _words(memory, 0), _words(memory, 1), self._counter()
        return (lambda: self._kernels.wait_for(read, counter, 0, self._state, self.patience),
                lambda: self._kernels.post(written, counter))

    def receiving(self, memory: SharedDeviceMemory) -> tuple[Callable[[], None], Callable[[], None]]:
        written, read, counter = _words(memory, 0), _words(memory, 1), self._counter()
        return (lambda: self._kernels.wait_for(written, counter, 1, self._state, self.patience),
                lambda: self._kernels.post(read, counter))

    def check(self) -> None:
        _check(int(self._state[0]))

    @property
    def waited_ns(self) -> int:
        return int(self._state[1])

    def close(self) -> None:
        self._state[0] = _STOPPED


class Waiting:
    """Who waits for the device on the host: one thread for results, another, perhaps, for drafts."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    @property
    def seconds(self) -> float:
        """For how long the one that began first has waited."""
        now = time.monotonic()
        return max((now - since for since in list(self._since.values())), default=0.0)

    @contextmanager
    def one(self) -> Iterator[None]:
        me = object()
        self._since[me] = time.monotonic()
        try:
            yield
        finally:
            del self._since[me]


class StreamWaits(DeviceWaits):
    """By flags that are 1 or 0. Whoever has waited for a 1 puts the flag back to 0, in the stream. Nobody writes the
    next 1 before: the answer that he needs first comes after the 0. So a graph with fixed values can be replayed.

    The device would wait for ever, so a thread looks after whoever waits for it on the host, and sets the flags itself
    when that takes too long.
    """

    def __init__(self, device: torch.device, patience: float = PATIENCE) -> None:
        super().__init__(device, patience)
        self._flags: list[int] = []
        """Addresses that this rank waits at."""
        self._waiting = Waiting()
        self._ended = 0
        # Made before anybody waits: making a stream, or its first use, may itself wait for all that runs. Of a higher
        # priority than streams of steps: those of one priority share a few queues of the GPU, and the one that is to
        # end a wait must not stand in a queue behind it.
        self._side = torch.cuda.Stream(device, priority=-1)
        tried = torch.zeros(1, dtype=torch.int32, device=device)
        self._set(self._side, tried.data_ptr(), 0)
        torch.cuda.synchronize(device)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="quire-waits", daemon=True)
        self._thread.start()

    @staticmethod
    def _set(stream: torch.cuda.Stream, address: int, value: int) -> None:
        call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address),
             ctypes.c_uint32(value), 0)

    def _wait(self, address: int) -> None:
        stream = torch.cuda.current_stream(self.device)
        call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address),
             ctypes.c_uint32(1), _EQUAL)
        self._set(stream, address, 0)

    def _tell(self, address: int) -> None:
        self._set(torch.cuda.current_stream(self.device), address, 1)

    def _own(self, *addresses: int) -> None:
        self._flags += addresses

    def meeting(self, rank: int, memories: Sequence[SharedDeviceMemory]) -> Callable[[int], None]:
        size = len(memories)

        def at(owner: int, teller: int, turn: int) -> int:
            return memories[owner].address + _LINE * (2 * teller + turn)

        others = [other for other in range(size) if other != rank]
        self._own(*(at(rank, other, turn) for other in others for turn in range(2)))

        def meet(turn: int) -> None:
            for other in others:
                self._tell(at(other, rank, turn))
            for other in others:
                self._wait(at(rank, other, turn))

        return meet

    def sending(self, memory: SharedDeviceMemory) -> tuple[Callable[[], None], Callable[[], None]]:
        written, read = memory.address, memory.address + _LINE
        _words(memory, 1).fill_(1)  # as if somebody had read what was there before
        torch.cuda.synchronize(self.device)
        self._own(read)
        return lambda: self._wait(read), lambda: self._tell(written)

    def receiving(self, memory: SharedDeviceMemory) -> tuple[Callable[[], None], Callable[[], None]]:
        written, read = memory.address, memory.address + _LINE
        self._own(written)
        return lambda: self._wait(written), lambda: self._tell(read)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with self._waiting.one():
            yield
        self.check()

    def check(self) -> None:
        _check(self._ended)

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if self._waiting.seconds > self.patience:
                self._ended = self._ended or _TIMED_OUT
                self._release()

    def _release(self) -> None:
        """Set every flag again and again, until whoever waited has gone on."""
        while self._waiting and not self._closed.wait(_RELEASE_SECONDS):
            for address in self._flags:
                self._set(self._side, address, 1)

    def close(self) -> None:
        self._ended = self._ended or _STOPPED
        self._closed.set()
        self._thread.join()


def _words(memory: SharedDeviceMemory, line: int, count: int = 1) -> Tensor:
    return memory.bytes[line * _LINE : line * _LINE + 4 * count].view(torch.int32)


def _check(ended: int) -> None:
    if ended:
        why = "it did not come in time" if ended == _TIMED_OUT else "the group was told to stop"
        raise RankLostError(f"a rank waited for another on the GPU: {why}")
