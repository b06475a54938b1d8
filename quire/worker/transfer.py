"""The half of a connector that moves KV: content of blocks between the device's caches and one tier, beside the steps.

The other half, `kvcache/connector.py`, says what the tier holds and names its blocks. They meet in the transfers of a
plan and in the reports of those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from quire.errors import QuireError
from quire.kernels.types import LayerCache
from quire.scheduler.plan import BlockMove, TransferReport, TransferStart

Report = Callable[[TransferReport], None]
_CLOSE_SECONDS = 10.0


class KVTransfer(ABC):
    """Moves blocks for one tier.

    Contract: `start` returns at once. Moves are made in their order, and reported as they are made; the last report of
    every transfer says that it is finished, whether it was made, failed or was cancelled. The blocks of the device are
    its own until then: those it fills are read by no step, those it copies out are written by none.
    """

    name: str
    """The tier's name in transfers."""

    @abstractmethod
    def register(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int]) -> None:
        """The device's caches, once and for all: a block of a group is a slice of each of its layers."""

    @abstractmethod
    def start(self, transfer: TransferStart, report: Report) -> None:
        """Begin; `report` may be called from any thread."""

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Cancel this transfer: copies not begun may be skipped. It still reports its end."""

    def close(self) -> None:  # noqa: B027 (some have nothing to let go of)
        """Let go of threads and memory. Idempotent."""


class ThreadedTransfer(KVTransfer):
    """Moves blocks on two threads of its own, one for each direction, some at a time."""

    blocks_at_once = 32
    """Moves between two reports."""

    def __init__(self) -> None:
        self._lanes: dict[bool, SimpleQueue[tuple[TransferStart, Report, object] | None]] = {}
        self._threads: list[Thread] = []
        self._open: set[int] = set()
        self._cancelled: set[int] = set()

    @abstractmethod
    def move(self, moves: Sequence[BlockMove], out: bool) -> None:
        """Move these, and return when that is done. Runs on a thread of its own."""

    def ready(self) -> object:
        """What a transfer that starts now has to wait for; asked on the thread that launches steps."""
        return None

    def wait_until(self, ready: object, out: bool) -> None:
        """Before the first move of a transfer, on its thread."""

    def start(self, transfer: TransferStart, report: Report) -> None:
        if transfer.out not in self._lanes:
            lane = self._lanes[transfer.out] = SimpleQueue()
            name = f"quire-{self.name}-{'out' if transfer.out else 'in'}"
            self._threads.append(Thread(target=self._work, args=(lane,), name=name, daemon=True))
            self._threads[-1].start()
        self._open.add(transfer.number)
        self._lanes[transfer.out].put((transfer, report, self.ready()))

    def cancel(self, number: int) -> None:
        if number in self._open:
            self._cancelled.add(number)

    def _work(self, lane: SimpleQueue[tuple[TransferStart, Report, object] | None]) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while (job := lane.get()) is not None:
                self._carry_out(*job)

    def _carry_out(self, transfer: TransferStart, report: Report, ready: object) -> None:
        done, error = 0, None
        try:
            self.wait_until(ready, transfer.out)
            while done < len(transfer.moves):
                if transfer.number in self._cancelled:
                    error = "the transfer was cancelled"
                    break
                piece = transfer.moves[done : done + self.blocks_at_once]
                self.move(piece, transfer.out)
                done += len(piece)
                if done < len(transfer.moves):
                    report(TransferReport(transfer.number, done))
        except Exception as problem:
            error = str(problem) if isinstance(problem, QuireError) else f"{type(problem).__name__}: {problem}"
        self._open.discard(transfer.number)
        self._cancelled.discard(transfer.number)
        report(TransferReport(transfer.number, done, finished=True, error=error))

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._lanes, self._threads = {}, []


class HostTransfer(ThreadedTransfer):
    """Host memory in the layout of the caches, pinned on a GPU, where each direction has a stream of its own.

    On a GPU a transfer waits for what was launched before it, and for nothing after; no step waits for it.
    """

    name = "host"

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._num_blocks = num_blocks
        self._parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By cache group: the tensors of the device and those of the host, whose first dimension is the block."""
        self._streams: dict[bool, torch.cuda.Stream] = {}
        self._device: torch.device | None = None

    def register(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int]) -> None:
        self._parts = {}
        for layer, group in zip(layers, group_of_layer, strict=True):
            for part in parts_of(layer):
                pinned = part.device.type == "cuda"
                # Pages that were never written cost nothing, so all of it is reserved at once.
                host = torch.zeros((self._num_blocks, *part.shape[1:]), dtype=part.dtype, pin_memory=pinned)
                self._parts.setdefault(group, []).append((part, host))
                if pinned:
                    self._device = part.device
        if self._device is not None:
            self._streams = {out: torch.cuda.Stream(self._device) for out in (False, True)}

    def ready(self) -> object:
        if self._device is None:
            return None
        launched = torch.cuda.Event()
        launched.record(torch.cuda.current_stream(self._device))
        return launched

    def wait_until(self, ready: object, out: bool) -> None:
        if self._device is not None and isinstance(ready, torch.cuda.Event):
            self._streams[out].wait_event(ready)

    def move(self, moves: Sequence[BlockMove], out: bool) -> None:
        if self._device is None:
            self._copy(moves, out)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams[out]):
            self._copy(moves, out)
            done = torch.cuda.Event(blocking=True)  # sleeps while it waits, so that no core spins
            done.record(self._streams[out])
        done.synchronize()

    def _copy(self, moves: Sequence[BlockMove], out: bool) -> None:
        """One copy for each run of blocks that lie side by side in both; all of them in one call, which holds no GIL.

        A call for each would wait for the GIL again after every one, 5 ms each time beside a thread that plans steps.
        """
        here: list[Tensor] = []
        there: list[Tensor] = []
        for run in runs(moves):
            first, count = run[0], len(run)
            # A pipeline stage may have no layer of a group.
            for device, host in self._parts.get(first.group, ()):
                here.append(device[first.device : first.device + count])
                there.append(host[first.tier : first.tier + count])
        if out:
            torch._foreach_copy_(there, here, non_blocking=True)
        else:
            torch._foreach_copy_(here, there, non_blocking=True)

    def close(self) -> None:
        super().close()
        self._parts = {}


def parts_of(layer: LayerCache) -> list[Tensor]:
    """The tensors that hold a layer's KV, all of them; the first dimension of each is the block."""
    return list(layer.tensors.values())


def runs(moves: Sequence[BlockMove]) -> list[list[BlockMove]]:
    """Neighbours in the list that are of one group and count up by one on both sides."""
    found: list[list[BlockMove]] = []
    for move in moves:
        last = found[-1][-1] if found else None
        if last is not None and (last.group, last.device + 1, last.tier + 1) == (move.group, move.device, move.tier):
            found[-1].append(move)
        else:
            found.append([move])
    return found
