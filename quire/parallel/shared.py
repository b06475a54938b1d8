"""Ranks of one machine: groups and links in memory that their processes share, moved by C (`kernels/cpu/collective.c`).

Whoever starts the processes makes the memory, all zero, and hands it to each: nothing here has a name that could be
left behind. A wait ends with RankLostError when the other process is gone, when `abort` was called on the memory, or
after the timeout.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import EngineError, RankLostError
from quire.kernels.cpu.library import load
from quire.kernels.slices import RankTree
from quire.parallel.collectives import KernelGroup, Link, TensorGroup

SLOT_BYTES = 16 << 20
"""Of a slot, of which every rank of a group has two: larger sums go in several exchanges. Logits of a decoding batch
should fit, since the head is read anew for every exchange. Pages that nobody writes take no memory."""
LINK_BYTES = 4 << 20
TIMEOUT = 300.0
"""Seconds that a rank waits for one that lives and does not come."""
_SPIN_NS = 1_000_000
"""How long a wait spins at most before it sleeps, where there is a core for every rank; in vain, less the next time."""
_MOST_STACK = 32  # MAX_STACK of collective.c
_WORD = struct.Struct("I")
_REASONS = {1: "the group was told to stop", 2: "it did not come in time", 3: "its process is gone"}


_PATIENCE = ("most_ns", "spin_ns", "timeout_ns", "waited_ns", "met_ns")


class _Group(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), *((name, ctypes.c_int64) for name in (
        "rank", "size", "slot_bytes", *_PATIENCE)))


class _LinkEnd(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("capacity", *_PATIENCE)))


def shared_group_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Memory of a group of `size` tensor ranks."""
    return int(load().quire_group_bytes(size, slot_bytes))


def shared_link_bytes(capacity: int = LINK_BYTES) -> int:
    """Memory of a link that holds `capacity` bytes on their way; longer messages pass through it in pieces."""
    return int(load().quire_link_bytes(capacity))


def abort(memory: Any) -> None:
    """End every wait on a group's or a link's memory, those to come too."""
    _WORD.pack_into(memory, 0, 1)


def _address(memory: Any, needed: int) -> tuple[int, Any]:
    """Of a writable buffer; and what keeps it alive."""
    view = memoryview(memory).cast("B")
    if view.readonly or view.nbytes < needed:
        raise EngineError(f"shared memory of {view.nbytes} bytes (read-only: {view.readonly}), where {needed} that can "
                          "be written are needed")
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    if ctypes.addressof(held) % 64:
        raise EngineError("shared memory must begin at a multiple of 64")
    return ctypes.addressof(held), held


def _spin_ns(processes: int) -> int:
    """With fewer cores than ranks whoever spins keeps the others from coming."""
    return _SPIN_NS if len(os.sched_getaffinity(0)) >= processes else 0


class SharedGroup(TensorGroup):
    """One rank's side of a group of processes, or of threads."""

    def __init__(self, memory: Any, rank: int, size: int, timeout: float = TIMEOUT,
                 slot_bytes: int = SLOT_BYTES) -> None:
        super().__init__(rank, size)
        self._library = library = load()
        address, self._held = _address(memory, library.quire_group_bytes(size, slot_bytes))
        self._slot_bytes = slot_bytes
        self._group = _Group(address, rank, size, slot_bytes, _spin_ns(size), _spin_ns(size), int(timeout * 1e9))
        self._at = ctypes.addressof(self._group)
        self._state = ctypes.c_int32()
        self._parts, self._lengths = (ctypes.c_void_p * size)(), (ctypes.c_int64 * size)()
        self._trees: dict[RankTree, tuple[int, int, npt.NDArray[np.int64]]] = {}
        """Where the steps of each tree lie, how many they are, and what keeps them there."""
        self._widths: dict[tuple[int, ...], Tensor] = {}
        self._calls = 0
        self.in_kernels = KernelGroup(self._at, self._steps, self._check, lambda: self._calls)
        self._slots: dict[int, Tensor] = {}
        """By address: this rank's slots as flat tensors."""
        self._make_room = library.quire_group_room
        self._sum = library.quire_group_sum
        library.quire_group_join(self._at)

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        return int(self._group.waited_ns)

    @waited_ns.setter
    def waited_ns(self, value: int) -> None:
        pass  # counted in C

    def _slot(self) -> Tensor:
        """Where this rank's next values go, as floats; waits until the others have read what was there."""
        self._calls += 1
        address = self._make_room(self._at, ctypes.byref(self._state))
        if not address:
            self._check(self._state.value)
        slot = self._slots.get(address)
        if slot is None:
            memory = (ctypes.c_char * self._slot_bytes).from_address(address)
            slot = self._slots[address] = torch.frombuffer(memory, dtype=torch.float32)
        return slot

    def _check(self, state: int) -> None:
        if state:
            raise RankLostError(f"tensor rank {self.rank} of {self.size} waited for another: {_REASONS[state]}")

    def rows_at_once(self, row_bytes: int) -> int:
        if row_bytes > self._slot_bytes:
            raise EngineError(f"a row of {row_bytes} bytes is more than the {self._slot_bytes} that ranks exchange at "
                              "once")
        return self._slot_bytes // row_bytes

    def room(self, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._slot()[: rows * columns].view(rows, columns)

    def _give(self, mine: Tensor) -> int:
        """Bytes of `mine` in this rank's slot; they are there already if `mine` is from `room`."""
        if mine.data_ptr() not in self._slots:
            self._slot()[: mine.numel()].view(mine.shape).copy_(mine)
        return mine.numel() * 4

    def exchange(self, mine: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """In as many rounds as the longest needs."""
        flat = mine.reshape(-1).contiguous()
        total, most = flat.numel() * flat.itemsize, self._slot_bytes
        found: list[Tensor] = []
        done, more = 0, True
        while more:
            room = self._slot().data_ptr()
            ctypes.memmove(room, flat.data_ptr() + min(done, total), min(max(0, total - done), most))
            self._check(self._library.quire_group_exchange(
                self._at, max(0, total - done), self._parts, self._lengths))
            lengths = list(self._lengths)
            found = found or [torch.empty(length // flat.itemsize, dtype=flat.dtype) for length in lengths]
            for out, part, length in zip(found, self._parts, lengths, strict=True):
                if length:
                    ctypes.memmove(out.data_ptr() + done, part, min(length, most))
            done, more = done + most, max(lengths) > most
        return found

    def pick(self, mine: Tensor, owners: Tensor) -> Tensor:
        rows, width = mine.shape
        most = self.rows_at_once(4 * width)
        out = torch.empty(rows, width)
        for start in range(0, rows, most):
            some, whose = mine[start : start + most], owners[start : start + most]
            self._give(some)
            self._check(self._library.quire_group_pick(
                self._at, whose.data_ptr(), some.shape[0], width, out[start:].data_ptr()))
        return out

    def sum_nodes(self, nodes: Tensor, tree: RankTree, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        _, rows, columns = nodes.shape
        out = torch.empty(rows, columns)
        self._check(self._sum(
            self._at, self._give(nodes), *self._steps(tree), rows, columns,
            None if bias is None else bias.data_ptr(), None if residual is None else residual.data_ptr(),
            out.data_ptr()))
        return out

    def _steps(self, tree: RankTree) -> tuple[int, int]:
        known = self._trees.get(tree)
        if known is None:
            found = tree.steps()
            depth = deepest = 0
            for _, _, merges in found:
                deepest, depth = max(deepest, depth + 1), depth + 1 - merges
            if deepest > _MOST_STACK:
                raise EngineError(f"the tree over {tree} needs {deepest} sums at once; the kernels hold {_MOST_STACK}")
            steps = np.array(found, np.int64)
            known = self._trees[tree] = steps.ctypes.data, len(steps), steps
        return known[:2]

    def gather(self, mine: Tensor, widths: Sequence[int], out: Tensor | None) -> None:
        key = tuple(widths)
        if key not in self._widths:
            self._widths[key] = torch.tensor(key, dtype=torch.int64)
        self._check(self._library.quire_group_gather(
            self._at, self._give(mine), self._widths[key].data_ptr(), mine.shape[0],
            None if out is None else out.data_ptr()))


class SharedLink(Link):
    """One side of a link: the one that `sends`, or the other."""

    def __init__(self, memory: Any, sends: bool, timeout: float = TIMEOUT, ranks: int = 2) -> None:
        """`memory` has `shared_link_bytes`; `ranks` are those of the machine, which may be more than its cores."""
        super().__init__()
        self._library = library = load()
        capacity = memoryview(memory).nbytes - library.quire_link_bytes(0)
        if capacity < 64:
            raise EngineError("the memory of a link is too small: use shared_link_bytes")
        address, self._held = _address(memory, library.quire_link_bytes(capacity))
        self._sends = sends
        self._end = _LinkEnd(address, capacity, _spin_ns(ranks), _spin_ns(ranks), int(timeout * 1e9))
        library.quire_link_join(ctypes.addressof(self._end), sends)

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        return int(self._end.waited_ns)

    @waited_ns.setter
    def waited_ns(self, value: int) -> None:
        pass  # counted in C

    def send(self, data: memoryview) -> None:
        if not self._sends:
            raise EngineError("this side of the link receives")
        self._move(data)

    def receive(self, into: memoryview) -> None:
        if self._sends:
            raise EngineError("this side of the link sends")
        self._move(into)

    def _move(self, data: memoryview) -> None:
        held = np.frombuffer(data, np.uint8)
        state = self._library.quire_link_move(ctypes.addressof(self._end), held.ctypes.data, held.size, self._sends)
        if state:
            raise RankLostError(f"a pipeline stage waited for its neighbour: {_REASONS[state]}")
