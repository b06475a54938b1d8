"""GEMMs that prefetch their weights while the previous kernel still runs, so that memory never idles between kernels.

One program per multiprocessor walks its share of the weight, tile after tile, through a ring of shared memory that the
copy engine (TMA) fills. It fills the ring before the previous kernel (a norm, a gate, attention) has ended, since
weights do not depend on that kernel. A share is a group of whole tiles if there are enough tiles to occupy the chip.
Otherwise all shares have the same number of turns (fills of a ring stage), and several programs may compute one tile:
the last of them to finish adds the parts, always in the same order, so the result does not depend on timing.

`available` is false without Hopper or without the Triton version whose Gluon we know (`prefetch_kernel`); other kernels
run then. The reference is `linear_few.linear_reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.prefetch_kernel import prefetch_kernel
except ImportError:  # another version of Triton
    prefetch_kernel = None

_KNOWN_TRITON = "3.6."
"""Gluon is an experimental part of Triton: its names and signatures change from version to version."""
MOST_ROWS = 256
MOST_SUMS = 384
"""Limit of tiles times padded rows: their sums take half as many registers in every thread."""
_SHARED = 226 << 10
"""Shared memory of a program in bytes, less a KiB for barriers: the ring, and the buffer that a tile is stored
through."""
FEATURES, SLAB = 64, 128
"""Features of a tile: those that one warp group multiplies at once. Bytes of a slab's row: the widest that TMA
swizzles."""
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "float8e4nv"}
LEAST_BOX = 8
_LEAST_STAGES = 3
"""Of a ring whose turns were changed: one that is read, one that has arrived, one on its way."""
_PARTIALS, _TILES = 9 << 20, 4096
"""Scratch for parts of tiles (two of 128 x 256 for each of 132 multiprocessors), and how many tiles may have parts."""
WARPS, _LOADING = 4, 24
"""Warps that multiply, and registers per thread of the warp that loads."""


@dataclass(frozen=True, slots=True)
class PrefetchShape:
    """Tiles of a group, stages of the ring, slabs of a turn, programs per multiprocessor (0: one program per group)."""

    tiles: int = 1
    stages: int = 6
    slabs: int = 2
    programs: int = 0

    def bytes_of(self, rows: int) -> int:
        """Shared memory of the ring."""
        return self.stages * self.slabs * (self.tiles * FEATURES + padded(rows)) * SLAB

    def shared(self, rows: int) -> int:
        """The ring, and the buffer for the sums of a tile (64 rows at a time) when a bias or residual is added."""
        return self.bytes_of(rows) + FEATURES * min(padded(rows), 64) * 4

    def groups(self, features: int) -> int:
        return triton.cdiv(features, self.tiles * FEATURES)

    def in_turns_of(self, slabs: int) -> PrefetchShape:
        """A ring of at most this size whose turns fill rows of so many slabs, as near to these turns as can be: 4 slabs
        of 64 columns fill no row of 896, 1,152 or 640 columns, but 2, 3 and 5 do. Itself where only turns of one slab
        would, each of which costs as much as a longer one."""
        if slabs % self.slabs == 0:
            return self
        ring = self.stages * self.slabs
        able = [count for count in range(2, ring // _LEAST_STAGES + 1) if slabs % count == 0]
        if not able:
            return self
        nearest = min(able, key=lambda count: abs(math.log2(count / self.slabs)))
        return replace(self, slabs=nearest, stages=ring // nearest)


@dataclass(slots=True)
class PrefetchScratch:
    """Parts of tiles until all of them are there. One for all GEMMs of a device, since they run one after another."""

    partial: Tensor
    arrived: Tensor
    """int32 [tiles]: finished parts of each tile; the last one sets it back to 0."""

    @classmethod
    def allocate(cls, device: torch.device | str, partials: int = _PARTIALS) -> PrefetchScratch:
        return cls(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(_TILES, dtype=torch.int32, device=device),
        )


def columns(dtype: torch.dtype) -> int:
    """Of a slab."""
    return SLAB // dtype.itemsize


def padded(rows: int) -> int:
    return max(LEAST_BOX, triton.next_power_of_2(rows))


def is_common(rows: int) -> bool:
    """Whether a compiled kernel for so many rows is likely to exist: up to 8 share one, each multiple of 16 has one."""
    return rows <= LEAST_BOX or rows % 16 == 0


@lru_cache(maxsize=8)
def available(device: torch.device) -> bool:
    """Whether this Triton and this chip have what the kernel needs."""
    known = prefetch_kernel is not None and triton.__version__.startswith(_KNOWN_TRITON)
    return known and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(weight: Tensor, sizes: PrefetchShape) -> int:
    """Never more than there are turns: a program without a turn would write a part without sums."""
    groups = sizes.groups(weight.shape[0])
    turns = groups * (weight.shape[1] // columns(weight.dtype) // sizes.slabs)
    return min(sizes.programs * multiprocessors(weight.device) if sizes.programs else groups, turns)


def fits(x: Tensor, weight: Tensor, sizes: PrefetchShape, scratch: PrefetchScratch) -> bool:
    """Whether the kernel can run this GEMM: whole turns, a ring that fits, and scratch for every part."""
    rows, width = x.shape
    slab = columns(x.dtype)
    groups, programs = sizes.groups(weight.shape[0]), _programs(weight, sizes)
    parts = 0 if groups == programs else 2 * programs * FEATURES * padded(rows)
    return (
        rows <= MOST_ROWS
        and x.dtype == weight.dtype
        and x.dtype in _KINDS
        and width % (slab * sizes.slabs) == 0
        and sizes.shared(rows) <= _SHARED
        and sizes.tiles * padded(rows) <= MOST_SUMS
        and (parts == 0 or sizes.tiles == 1)
        and parts <= scratch.partial.numel()
        and groups <= scratch.arrived.numel()
        and programs * groups * (width // slab // sizes.slabs) < 1 << 31
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def linear_prefetch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    sizes: PrefetchShape,
    scratch: PrefetchScratch,
    scales: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features] of up to `MOST_ROWS` rows: x W^T + bias + residual. With `scales` (of features, of rows;
    float32) x W^T is multiplied by both: a GEMM of fp8, whose `out` has another type and must be given."""
    rows, width = x.shape
    features, slab = weight.shape[0], columns(x.dtype)
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    pad = padded(rows)
    weight_rows, x_rows, boxes = descriptors(weight, x)
    sums, stored = layouts(pad, 32 // x.dtype.itemsize)
    prefetch_kernel[(_programs(weight, sizes),)](
        weight_rows,
        x_rows,
        out if scales is None else scales[0],
        out if scales is None else scales[1],
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        rows,
        features,
        width // slab // sizes.slabs,
        sizes.stages,
        sizes.tiles,
        sizes.slabs,
        pad,
        boxes,
        scales is not None,
        bias is not None,
        residual is not None,
        pdl,
        sums,
        stored,
        num_warps=WARPS,
        maxnreg=registers(sizes.tiles * pad),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def descriptors(weight: Tensor, x: Tensor) -> tuple[Any, Any, int]:
    """What TMA copies: a slab of a tile of the weight, a slab of a box of rows; and the number of boxes."""
    kind, slab, rows = getattr(gl, _KINDS[x.dtype]), columns(x.dtype), x.shape[0]
    # The tallest box (a power of two) that divides the rows.
    tile, box = [FEATURES, slab], [max(rows & -rows, LEAST_BOX), slab]
    return (
        TensorDescriptor.from_tensor(weight, tile, gl.NVMMASharedLayout.get_default_for(tile, kind)),
        TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, kind)),
        triton.cdiv(rows, box[0]),
    )


def registers(sums: int) -> int:
    """Registers per thread at launch, before warp specialization moves some from the loading warp to the others. As few
    as possible: the next kernel can only start early if it fits beside this one."""
    wanted = min(232, (sums // 2 + 80 + 7) // 8 * 8)
    return max((wanted + _LOADING) // 2 // 8 * 8, min(168, (sums // 2 + 40) // 8 * 8))


@lru_cache(maxsize=16)
def layouts(rows: int, depth: int) -> tuple[Any, Any]:
    """How the sums of a tile [features, rows] lie in registers, and how they are stored: by runs of features. `depth`
    columns are multiplied by one instruction."""
    sums = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, rows, depth])
    return sums, gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
