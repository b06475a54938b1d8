"""`linear_fixed` for many rows on Hopper: its additions in its order, by tiles that the copy engine loads.

Two warp groups multiply while a warp loads, and sums in slices keep a tile of 128 x 128 (`fixed_tiles_kernel` says
how), where `linear_fixed` needs tiles of 128 x 64 and 64 x 32. A sum's order is that of `linear_fixed`: k in steps of
16 (one tensor core instruction), each slice from zero, the slices' tree. So the bits should be the same;
tests/gpu/test_bits.py compares them on a chip. `fixed_table` says which GEMMs run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.slices import Slices
from quire.kernels.triton.linear_prefetch import PrefetchScratch, multiprocessors

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.fixed_tiles_kernel import fixed_tiles_kernel
except ImportError:  # another version of Triton
    fixed_tiles_kernel = None

ROWS, GROUP_ROWS, COLUMNS = 128, 64, 64
"""Rows of a tile and of a warp group's half of it; columns of a turn."""
_INNER = 4
"""Slices that add up in registers."""
_MOST_PARTS, _MOST_GROUPS = 4, 16
"""Nodes of a tile that one thread can add in registers; groups of slices in a unit."""
_SHARED = 227 << 10
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_REGISTERS = 240
"""Of a thread that multiplies: 168 for each of the 12 warps, less what the loading warp and its idle neighbours leave
(24 each)."""
_SHORT = 4
"""Turns of a slice at most that warp groups multiply in order: nothing waits in between."""


@dataclass(frozen=True, slots=True)
class FixedTiles:
    """How a GEMM runs: features of a tile, stages of the ring, units of a tile, whether the warp groups take slices in
    turn, row tiles of a band."""

    features: int = 128
    stages: int = 4
    parts: int = 1
    ordered: bool = False
    band: int = 8

    @classmethod
    def of(cls, sizes: Sequence[int]) -> FixedTiles:
        """As a table has them."""
        features, stages, parts, ordered, band = sizes
        return cls(features, stages, parts, bool(ordered), band)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Turns of a slice, slices of a group, groups of a unit, places for the sums of groups."""

    slice_turns: int
    inner: int
    groups: int

    @property
    def places(self) -> int:
        return (self.groups - 1).bit_length()


def unit_of(weight: Tensor, slices: Slices | None, tiles: FixedTiles) -> _Unit | None:
    """None where the kernel cannot sum so: slices of unequal length or of no whole turns, parts that are no nodes."""
    count, width = 1 if slices is None else slices.total, weight.shape[1]
    if slices is not None and (not slices.whole or width % count or slices.sum_width % (count * slices.unit)):
        return None
    if count > 1 and width // count % COLUMNS:
        return None
    turns = triton.cdiv(width // count, COLUMNS)
    run, rest = divmod(count, tiles.parts)
    # Equal parts are nodes if each has a power of two of slices.
    if rest or (tiles.parts > 1 and (run & (run - 1) or tiles.parts > _MOST_PARTS)):
        return None
    inner = min(run, _INNER)
    if run % inner or inner == 3 or run // inner > _MOST_GROUPS:
        return None
    if tiles.ordered and (tiles.parts > 1 or turns > min(_SHORT, tiles.stages)):
        return None  # in parts the registers do not suffice: the assembler would make every MMA wait
    return _Unit(turns, inner, run // inner)


def shared_bytes(tiles: FixedTiles, unit: _Unit, itemsize: int = 2) -> int:
    """The ring, the barriers, and what tiles are stored through: the sums that wait, or a half of the tile."""
    ring = tiles.stages * (ROWS + tiles.features) * COLUMNS * itemsize
    return ring + ROWS * tiles.features * (4 if unit.places else itemsize // 2) + 512


@dataclass(slots=True)
class TileScratch:
    """Sums of many slices, of each program: three of a tile of 128 x 128, or of 128 x 256, as the GEMM in CUDA C may
    have them. One for all GEMMs of a device."""

    deep: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, programs: int, features: int = 256) -> TileScratch:
        return cls(torch.empty(programs * 3 * ROWS * features, dtype=torch.float32, device=device))

    @classmethod
    def for_device(cls, device: torch.device, features: int = 256) -> TileScratch:
        return cls.allocate(device, multiprocessors(device) if device.type == "cuda" else 1, features)


def fits(
    x: Tensor, weight: Tensor, slices: Slices | None, tiles: FixedTiles, scratch: PrefetchScratch, deep: TileScratch
) -> bool:
    """Whether the kernel can run this GEMM: what it can sum, registers, shared memory and scratch."""
    unit = unit_of(weight, slices, tiles)
    if unit is None or shared_bytes(tiles, unit) > _SHARED:
        return False
    if tiles.features not in (128, 256) or (tiles.features == 256 and (unit.inner > 1 or tiles.parts > 1)):
        return False
    rows, features = x.shape[0], weight.shape[0]
    halves = 2 * triton.cdiv(rows, ROWS) * triton.cdiv(features, tiles.features)
    room = tiles.parts == 1 or (
        halves * tiles.parts * GROUP_ROWS * tiles.features <= scratch.partial.numel()
        and halves <= scratch.arrived.numel()
    )
    put_away = max(unit.places - 1, 0) * 2 * GROUP_ROWS * tiles.features
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and weight.shape[1] % 8 == 0
    known = x.dtype == weight.dtype and x.dtype in _KINDS and x.is_contiguous() and weight.is_contiguous()
    return known and aligned and room and put_away * multiprocessors(x.device) <= deep.deep.numel()


def linear_fixed_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, slices: Slices | None = None, *,
    tiles: FixedTiles, scratch: PrefetchScratch, deep: TileScratch, pdl: bool = False,
) -> Tensor:
    """x W^T + bias + residual with the additions of `linear_fixed.linear_fixed`."""
    rows, features = x.shape[0], weight.shape[0]
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    unit = unit_of(weight, slices, tiles)
    assert unit is not None
    num_units = triton.cdiv(rows, ROWS) * triton.cdiv(features, tiles.features) * tiles.parts
    sums, stored, kept = _layouts(tiles.features)
    fixed_tiles_kernel[(min(num_units, multiprocessors(x.device)),)](
        _described(weight, tiles.features),
        _described(x, GROUP_ROWS),
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        deep.deep,
        rows,
        features,
        num_units,
        tiles.stages,
        unit.slice_turns,
        unit.inner,
        unit.groups,
        unit.places,
        tiles.parts,
        tiles.parts.bit_length() - 1,
        tiles.band,
        tiles.ordered,
        bias is not None,
        residual is not None,
        pdl,
        _REGISTERS,
        sums,
        stored,
        kept,
        num_warps=4,
        maxnreg=168,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _described(tensor: Tensor, height: int) -> Any:
    """What the copy engine copies at once."""
    kind, block = getattr(gl, _KINDS[tensor.dtype]), [height, COLUMNS]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, kind))


@lru_cache(maxsize=4)
def _layouts(features: int) -> tuple[Any, Any, Any]:
    """How a warp group's sums lie in registers, how they are stored, how they wait in shared memory."""
    sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, features, 16])
    stored = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    return sums, stored, gl.NVMMASharedLayout(128, 32)
