"""A tied head that the first and the last stage of a pipeline compute together (`kernels/cpu/shared_head.c`).

Both hold the table: one for the embeddings, one for the head. While sequences decode, the head is a good part of the
last stage's work, and of a prompt's next to none; so layers cannot be dealt evenly for both. Instead the first stage
helps with the head, piece by piece, with whatever time it has. Logits have the bits that one stage gives them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.cpu.library import load
from quire.kernels.types import StepContext

HEAD_BYTES = 48 << 20
"""Of the memory that both stages share; pages that nobody writes to take none."""
_DATA = 4096  # DATA of shared_head.c
_MOST_ROWS = 64
"""Of more rows most are prompts' ends, of which a step has few."""
_LEAST_COLUMNS = 4096
"""A smaller head is not worth asking for."""


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """What both stages share, and the core on which the helping one waits for plans."""

    memory: memoryview
    core: int | None = None


class _Table:
    """A packed table, the shared memory, and how many rows it has room for."""

    def __init__(self, memory: memoryview, packed: Any) -> None:
        self._held = (ctypes.c_char * memory.nbytes).from_buffer(memory)
        self.area = ctypes.addressof(self._held)
        self.packed = packed
        self.columns, self.width = packed.out_features, packed.in_features
        self.most = min(_MOST_ROWS, (memory.nbytes - _DATA) // (4 * (self.columns + self.width)))

    @staticmethod
    def can_be_shared(packed: Any) -> bool:
        """Floats of whichever format; integers have a GEMM of their own."""
        return packed.format in ("float32", "bfloat16", "scaled8", "scaled4") and packed.bias is None and (
            packed.out_features >= _LEAST_COLUMNS)


class HeadOwner:
    """The last stage's side: it asks, and computes whatever is not computed for it."""

    def __init__(self, head: HeadMemory, packed: Any, alone: Callable[..., Tensor]) -> None:
        """`alone`: the same without help."""
        self._table = _Table(head.memory, packed) if _Table.can_be_shared(packed) else None
        self._alone = alone
        self._logits = load().quire_head_logits

    def logits(self, x: Tensor, ctx: StepContext | None, out: Tensor | None = None) -> Tensor:
        table, rows = self._table, x.shape[0]
        if table is None or not 0 < rows <= table.most:
            return self._alone(x, ctx, out)
        x = x.contiguous()
        if out is None:
            out = torch.empty(rows, table.columns)
        for name, tensor, columns in (("rows", x, table.width), ("logits", out, table.columns)):
            if tensor.shape != (rows, columns) or tensor.dtype is not torch.float32 or not tensor.is_contiguous():
                raise EngineError(f"the {name} of a shared head are float32 [{rows}, {columns}], contiguous")
        self._logits(table.area, table.most, x.data_ptr(), table.packed.panels_ptr, table.packed.format_code,
                     out.data_ptr(), rows, table.columns, table.width)
        return out


class HeadHelper:
    """The first stage's side: a thread that computes pieces of what the last stage asks for."""

    def __init__(self, head: HeadMemory, packed: Any) -> None:
        self._library = load()
        self._table = _Table(head.memory, packed) if _Table.can_be_shared(packed) else None
        self._core = head.core
        self._thread = threading.Thread(target=self._serve, name="quire-head", daemon=True)
        if self._table is not None and self._table.most > 0:
            self._thread.start()

    def _serve(self) -> None:
        table = self._table
        if table is None:
            return
        if self._core is not None:  # the other cores are other ranks'
            with suppress(OSError):
                os.sched_setaffinity(0, {self._core})
        self._library.quire_head_help(table.area, table.most, table.packed.panels_ptr, table.packed.format_code,
                                      table.columns, table.width)

    def close(self) -> None:
        if self._table is not None:
            self._library.quire_head_stop(self._table.area)
        if self._thread.is_alive():
            self._thread.join()
