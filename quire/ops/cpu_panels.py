"""Packed weights as the compiled GEMMs read them: panels, bias, slices, and their addresses."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.quantized import StoredWeight
from quire.kernels.slices import Slices

_MAX_STACK = 16  # MAX_STACK of linear.c
_PANELS = 64
"""Rows, a multiple of those of a panel in every variant."""
_NUMBERS_AT_ONCE = 1 << 20
_GIVE_BACK_BYTES = 32 << 20
"""Packed since memory was last given back: that takes some milliseconds."""
_LINE = 64
_HUGE_PAGE = 2 << 20
_SIDE_BY_SIDE = 4 << 20
"""A weight of more bytes has memory of its own, of which most is whole huge pages."""
_CHUNK = 32 << 20
"""Of address space, for several weights; memory is taken as they are packed."""


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """A weight in panels of columns, and its bias, as the compiled GEMM reads them.

    `format` says how few bytes hold the very same floats: it changes a GEMM's time, never its result.
    """

    panels: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int
    format: str
    panels_ptr: int
    bias_ptr: int | None
    format_code: int
    slices: Slices | None
    slice_ends: Tensor | None
    """int64 [slices, 2]: where each slice ends, and how many additions follow it."""
    slices_ptr: int | None
    num_slices: int
    num_nodes: int
    """Sums that are left of the run of slices; 1 where it is all of them."""

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class PanelGroup:
    """Weights of one shape, as the compiled grouped GEMM reads them."""

    members: tuple[PanelLinear, ...]
    table: NDArray[np.int64]
    """[weights, 4]: panels, bias, format, and room for a step's number of rows."""
    out_features: int
    in_features: int


def rows_at_once(width: int) -> int:
    """Of a weight of so many columns that is packed from another type: whole panels of every variant."""
    return max(1, _NUMBERS_AT_ONCE // max(1, width) // _PANELS) * _PANELS


def float_rows(parts: Sequence[StoredWeight], start: int, stop: int) -> Tensor:
    """float32 rows [start, stop) of parts that lie one below the other."""
    found, first = [], 0
    for part in parts:
        low, high = max(start - first, 0), min(stop - first, part.shape[0])
        if low < high:
            found.append((part.detach()[low:high] if isinstance(part, Tensor) else
                          part.rows(slice(low, high)).dequantized()).to(torch.float32))
        first += part.shape[0]
    return (found[0] if len(found) == 1 else torch.cat(found)).contiguous()


def packed_floats(
    library: ctypes.CDLL, parts: Sequence[StoredWeight], shape: tuple[int, int], panels: Tensor, code: int
) -> bool:
    """Packs the weight that the parts make. Whether every number comes back bit for bit; if not, `panels` are garbage.
    What is not float32 becomes so a few rows at a time."""
    (n, k), one = shape, parts[0]
    ready = len(parts) == 1 and isinstance(one, Tensor) and one.dtype is torch.float32 and one.is_contiguous()
    step = n if ready else rows_at_once(k)
    for start in range(0, n, max(1, step)):
        rows = float_rows(parts, start, start + step)
        place = panels.data_ptr() + library.quire_packed_bytes(code, start, k)
        if not library.quire_pack(rows.data_ptr(), place, rows.shape[0], k, code):
            return False
    return True


class PanelMemory:
    """Room for packed weights: small ones lie side by side, so that huge pages lie under them too.

    A step reads every weight once. Small weights in memory of their own are in pages of 4 KiB, and each page is a walk
    through the page tables, where hardware prefetch ends as well. For one thread at a time.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._free = torch.empty(0, dtype=torch.uint8)
        self._packed_bytes = 0

    def room(self, nbytes: int) -> Tensor:
        """Bytes for a packed weight. They are room for the next one too, until `keep`."""
        if nbytes > _SIDE_BY_SIDE:
            return self._advised(torch.empty(nbytes + _LINE, dtype=torch.uint8), _LINE)[:nbytes]
        if nbytes > self._free.nbytes:
            pages = mmap.mmap(-1, _CHUNK + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._free = self._advised(torch.frombuffer(pages, dtype=torch.uint8), _HUGE_PAGE)
        return self._free[:nbytes]

    def _advised(self, memory: Tensor, alignment: int) -> Tensor:
        memory = memory[-memory.data_ptr() % alignment :]
        self._library.quire_advise_huge_pages(memory.data_ptr(), memory.nbytes)
        return memory

    def keep(self, panels: Tensor) -> Tensor:
        """The weight that was packed into the room. Now and then, what weights were read and packed through is given
        back: it lies between them, malloc keeps it."""
        if panels.data_ptr() == self._free.data_ptr():
            self._free = self._free[-(-panels.nbytes // _LINE) * _LINE :]
        self._packed_bytes += panels.nbytes
        if self._packed_bytes >= _GIVE_BACK_BYTES:
            self._packed_bytes = 0
            self._library.quire_give_back()
        return panels


def _slice_ends(slices: Slices, width: int) -> Tensor:
    """The slices of a weight's columns as the compiled GEMM reads them."""
    slices.check_width(width)
    merges = slices.merges()
    deepest = on_stack = 0
    for count in merges:
        deepest = max(deepest, on_stack + 1)
        on_stack += 1 - count
    if deepest > _MAX_STACK:
        raise EngineError(f"the tree over {slices} needs {deepest} sums at once; the CPU kernels hold {_MAX_STACK}")
    return torch.tensor(list(zip(slices.borders[1:], merges, strict=True)), dtype=torch.int64)


def described(
    panels: Tensor, name: str, code: int, shape: tuple[int, int], bias: Tensor | None, slices: Slices | None
) -> PanelLinear:
    """A packed weight [N, K] with its bias and slices, and their addresses."""
    n, k = shape
    ends = None if slices is None else _slice_ends(slices, k)
    kept = None if bias is None else bias.detach().to(torch.float32, copy=True).contiguous()
    return PanelLinear(
        panels=panels,
        bias=kept,
        out_features=n,
        in_features=k,
        format=name,
        panels_ptr=panels.data_ptr(),
        bias_ptr=None if kept is None else kept.data_ptr(),
        format_code=code,
        slices=slices,
        slice_ends=ends,
        slices_ptr=None if ends is None else ends.data_ptr(),
        num_slices=0 if slices is None else slices.count,
        num_nodes=1 if slices is None else len(slices.nodes()),
    )
