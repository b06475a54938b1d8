"""Ranks on GPUs of one machine: each reads the others' memory, and waits for them on the device, also inside graphs.

A rank has two slots that the others read. It writes what it has to say into one of them, meets the others
(`device_waits.py`), and reads their slots; the next exchange is through the other slot. Whoever has arrived
at an exchange has read the one before, so nothing is acknowledged. A captured graph has fixed addresses: `settle` ends
every step on the first slot, whatever the number of its exchanges, so that the next one, or the next replay, begins
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.slices import RankTree, finish_tree
from quire.parallel.collectives import TensorGroup

HEAD_BYTES = 4096
"""Of a rank's memory, for what it is told by others; its slots, or its rows for the next stage, come behind."""
GROUP_SLOT_BYTES = 32 << 20
LINK_SLOT_BYTES = 32 << 20
ONE_SHOT_BYTES = 512 << 10
"""Of a sum that every rank makes for itself, at most, where there is another way: nobody has measured the border."""


def group_bytes(slot_bytes: int = GROUP_SLOT_BYTES) -> int:
    return HEAD_BYTES + 2 * slot_bytes


class PeerGroup(TensorGroup):
    """One rank's side of a group. Nothing here waits for the device: exchanges are launches like all others."""

    on_device = True

    def __init__(self, rank: int, memories: Sequence[Tensor], meet: Callable[[int], None],
                 large_sum: Callable[[Tensor], Tensor] | None = None) -> None:
        """`memories`: of every rank all bytes, of `group_bytes`; `meet` launches a wait for all the others, and is told
        which slot the exchange is through. `large_sum` adds up, in place, what is too much for everybody to read from
        everybody."""
        super().__init__(rank, len(memories))
        self._large_sum = large_sum
        self._meet = meet
        self._slot_bytes = (memories[0].numel() - HEAD_BYTES) // 2
        self._slots = [[memory[HEAD_BYTES + turn * self._slot_bytes :][: self._slot_bytes] for memory in memories]
                       for turn in range(2)]
        self._turn = 0

    def rows_at_once(self, row_bytes: int) -> int:
        if row_bytes > self._slot_bytes:
            raise EngineError(f"a row of {row_bytes} bytes is more than the {self._slot_bytes} that ranks exchange at "
                              "once")
        return self._slot_bytes // max(1, row_bytes)

    def room(self, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._part(self.rank, rows * columns, dtype).view(rows, columns)

    def settle(self) -> None:
        if self._turn:
            self._advance()

    def _part(self, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        """The first values of a rank's slot of this exchange."""
        return self._slots[self._turn][rank][: count * dtype.itemsize].view(dtype)

    def _advance(self) -> None:
        self._meet(self._turn)
        self._turn ^= 1

    def _exchanged(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Every rank's values where they lie: to be read before this rank gives anything more."""
        room = self._part(self.rank, mine.numel(), mine.dtype)
        if mine.data_ptr() != room.data_ptr():
            room.view(mine.shape).copy_(mine)
        found = [self._part(rank, count, mine.dtype) for rank, count in enumerate(counts)]
        self._advance()
        return found

    def exchange(self, mine: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        flat = mine.reshape(-1)
        counts = [flat.numel()] * self.size if counts is None else counts
        most = self.rows_at_once(flat.itemsize)
        found = [flat.new_empty(count) for count in counts]
        for start in range(0, max(1, *counts), most):
            pieces = [max(0, min(most, count - start)) for count in counts]
            parts = self._exchanged(flat[start : start + most], pieces)
            for out, part in zip(found, parts, strict=True):
                out[start : start + part.numel()] = part
        return found

    def sum_nodes(self, nodes: Tensor, tree: RankTree, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        _, rows, columns = nodes.shape
        owned = [tree.nodes(rank) for rank in range(self.size)]
        parts = self._exchanged(nodes, [len(mine) * rows * columns for mine in owned])
        values = {node: value for mine, part in zip(owned, parts, strict=True)
                  for node, value in zip(mine, part.view(-1, rows, columns), strict=True)}
        return _added(finish_tree(tree.total, values), bias, residual)

    def sum_parts(self, part: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if self._large_sum is not None and part.nbytes > ONE_SHOT_BYTES:
            return _added(self._large_sum(part).float(), bias, residual).to(part.dtype)
        parts = self._exchanged(part, [part.numel()] * self.size)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        return _added(total.view(part.shape), bias, residual).to(part.dtype)

    def maximum(self, mine: Tensor) -> Tensor:
        found, *others = self._exchanged(mine, [mine.numel()] * self.size)
        for other in others:
            found = torch.maximum(found, other)
        return found.view(mine.shape)

    def gather(self, mine: Tensor, widths: Sequence[int], out: Tensor | None) -> None:
        rows = mine.shape[0]
        parts = self._exchanged(mine, [rows * width for width in widths])
        if out is not None:
            torch.cat([part.view(rows, -1) for part in parts], dim=1, out=out)

    def pick(self, mine: Tensor, owners: Tensor) -> Tensor:
        rows, columns = mine.shape
        most = self.rows_at_once(columns * mine.itemsize)
        found = []
        for start in range(0, max(1, rows), most):
            some, whose = mine[start : start + most], owners[start : start + most, None]
            first, *others = self._exchanged(some, [some.numel()] * self.size)
            picked = first.view(some.shape)
            for rank, other in enumerate(others, 1):
                picked = torch.where(whose == rank, other.view(some.shape), picked)
            found.append(picked)
        return found[0] if len(found) == 1 else torch.cat(found)


def _added(total: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """In float32, bias first: the order of one rank."""
    total = total if bias is None else total + bias
    return total if residual is None else total + residual


class RowsLink(Protocol):
    """Hands rows from one pipeline stage to the next, in the order of the steps."""

    def send(self, rows: Tensor) -> None: ...

    def receive(self, rows: int, columns: int) -> Tensor: ...


class PeerLink:
    """One side of a link: rows go through the sender's memory."""

    def __init__(self, memory: Tensor, dtype: torch.dtype, ready: Callable[[], None], done: Callable[[], None]) -> None:
        """`ready` waits until the memory may be written (by the sender) or read (by the receiver); `done` says that it
        was."""
        self._slot = memory[HEAD_BYTES:].view(dtype)
        self._ready, self._done = ready, done

    def _pieces(self, rows: int, columns: int) -> list[tuple[slice, Tensor]]:
        most = self._slot.numel() // columns
        if most == 0:
            raise EngineError(f"a row of {columns} values is more than stages hand on at once")
        pieces = [slice(start, min(start + most, rows)) for start in range(0, rows, most)]
        return [(some, self._slot[: (some.stop - some.start) * columns].view(-1, columns)) for some in pieces]

    def send(self, rows: Tensor) -> None:
        for some, slot in self._pieces(*rows.shape):
            self._ready()
            slot.copy_(rows[some])
            self._done()

    def receive(self, rows: int, columns: int) -> Tensor:
        found = self._slot.new_empty(rows, columns)
        for some, slot in self._pieces(rows, columns):
            self._ready()
            found[some].copy_(slot)
            self._done()
        return found

