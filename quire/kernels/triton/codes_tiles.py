"""GEMMs of a weight of 4-bit codes (W4A16) with many rows, up to 512: bound by the tensor cores, not by memory.

Codes lie as `linear_codes` packs them, in groups of 64 columns and more. A tile is 128 to 384 features by 32 to 256
rows; see `codes_tiles_kernel`. More rows than a tile has are several tiles, so each code becomes a float once for each
of them: with 128 rows of a tile that takes a third of the time that the tensor cores need. A weight is
scale * (code - 8) + offset, rounded once to the activations' type, as `linear_codes` has it with many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.triton.linear_codes import COLUMNS, PackedCodes
from quire.kernels.triton.linear_prefetch import PrefetchScratch, multiprocessors

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.codes_tiles_kernel import codes_tiles_kernel
except ImportError:  # another version of Triton
    codes_tiles_kernel = None

MOST_ROWS = 512
_SHARED = 226 << 10
"""Bytes of a program, less a KiB for barriers."""
_WORDS = 32
"""Of 64 columns in a row of packed words; a row has four features."""
_STORED_ROWS = 32
"""Of a warp group's tile, exchanged at a time as float32."""
_SLABS = 2
"""Of a turn."""
_GROUP_THREADS = 128
_REGISTERS = 1 << 16
"""Of a multiprocessor."""
_LOADING = 24
"""Of a thread of the loading warp; the chip gives registers to four warps at a time."""


@dataclass(frozen=True, slots=True)
class CodesTilesShape:
    """Warp groups that multiply, features of each, rows of a tile, stages of the ring, and programs for each tile (0:
    equal shares of all tiles for every multiprocessor)."""

    groups: int = 3
    features: int = 64
    rows: int = 128
    stages: int = 4
    parts: int = 1

    def shared(self, run: int) -> int:
        """Bytes, if a scale is that of `run` columns: the ring, and what sums are stored through."""
        codes = self.groups * self.features * (COLUMNS // 2 + COLUMNS * 4 // run)
        ring = self.stages * _SLABS * (codes + self.rows * COLUMNS * 2)
        return ring + self.groups * self.features * min(self.rows, _STORED_ROWS) * 4

    @property
    def launched(self) -> int:
        """Registers of a thread at launch, when all have as many."""
        return _REGISTERS // ((self.groups + 1) * _GROUP_THREADS) // 8 * 8

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, once the loading warp has given away what it does not need."""
        return min(240, (_REGISTERS // _GROUP_THREADS - _LOADING) // self.groups // 8 * 8)

    @property
    def known(self) -> bool:
        """Whether the kernel has such tiles: its sums and two operands must fit in registers."""
        sizes = self.groups in (2, 3) and self.features in (64, 128) and self.rows in (32, 64, 128, 256)
        held = self.features * self.rows // _GROUP_THREADS + 2 * self.features * COLUMNS // 2 // _GROUP_THREADS
        return sizes and self.stages > 1 and self.parts >= 0 and held + 40 <= self.registers

    def tiles(self, features: int) -> int:
        return triton.cdiv(features, self.groups * self.features)

    def row_tiles(self, rows: int) -> int:
        return triton.cdiv(rows, self.rows)


def fits(rows: int, weight: PackedCodes, sizes: CodesTilesShape, scratch: PrefetchScratch) -> bool:
    """Whether the kernel can multiply so many rows: whole turns, a ring that fits, and scratch for every part."""
    if not sizes.known or weight.depth != COLUMNS or weight.width % (COLUMNS * _SLABS):
        return False
    tiles, programs = sizes.tiles(weight.features) * sizes.row_tiles(rows), programs_of(rows, weight, sizes)
    parts = 0 if tiles % programs == 0 else 2 * programs * sizes.groups * sizes.features * sizes.rows
    return (
        rows <= MOST_ROWS
        and sizes.shared(weight.run(_SLABS)) <= _SHARED
        and parts <= scratch.partial.numel()
        and tiles * sizes.groups <= scratch.arrived.numel()
        and (programs + 1) * tiles * _turns(weight, sizes) < 1 << 31
    )


def linear_codes_tiles(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    sizes: CodesTilesShape,
    scratch: PrefetchScratch,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features] of up to `MOST_ROWS` rows: x W^T + bias + residual."""
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, weight.features, dtype=x.dtype, device=x.device)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    turns, tiles = _turns(weight, sizes), sizes.tiles(weight.features)
    codes_tiles_kernel[(programs_of(rows, weight, sizes),)](
        _described(weight.words, [sizes.features // 4, _WORDS], gl.int32),
        _described(x, [sizes.rows, COLUMNS], kind),
        _described(weight.scales.view(-1), [sizes.features], gl.int32),
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        rows,
        weight.features,
        turns,
        tiles,
        turns * tiles * sizes.row_tiles(rows),
        sizes.stages,
        sizes.groups,
        _SLABS * COLUMNS // weight.run(_SLABS),
        weight.group,
        sizes.registers,
        bias is not None,
        residual is not None,
        pdl,
        _layouts(sizes.features, sizes.rows),
        num_warps=4,
        maxnreg=sizes.launched,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _turns(weight: PackedCodes, sizes: CodesTilesShape) -> int:
    """Of a tile."""
    return weight.width // COLUMNS // _SLABS


def programs_of(rows: int, weight: PackedCodes, sizes: CodesTilesShape) -> int:
    """Up to one for each multiprocessor; whole rounds where tiles or their parts are more."""
    most = multiprocessors(weight.words.device)
    tiles = sizes.tiles(weight.features) * sizes.row_tiles(rows)
    units = tiles * sizes.parts or most
    return min(triton.cdiv(units, triton.cdiv(units, most)), tiles * _turns(weight, sizes))


def _described(tensor: Tensor, block: list[int], kind: Any) -> Any:
    """What the copy engine copies at once."""
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, kind))


@lru_cache(maxsize=16)
def _layouts(features: int, rows: int) -> tuple[Any, Any, Any, Any]:
    """How a warp group's words of a slab, its sums [features, rows], parts of them to be put away and rows to be stored
    lie in registers."""
    words = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])
    flat = gl.BlockedLayout([4], [32], [4], [0])
    return words, sums, flat, gl.BlockedLayout([8, 1], [features // 8, 256 // features], [1, 4], [0, 1])
