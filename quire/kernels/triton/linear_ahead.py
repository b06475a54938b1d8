"""Matrix products that ask for their weights before their rows are there, so that memory never rests between kernels.

One program a multiprocessor walks its share of the weight, tile after tile, through a ring of shared memory that the
copy engine fills. The ring is asked for before the kernel ahead (a norm, a gate, attention) has ended: weights do not
depend on it. What is left of that kernel, and the start of this one, then cost no time of the memory. A share is a
group of whole tiles where there are enough of them to occupy the chip. Else shares are equal to a turn of the ring, and
a tile may be computed by several programs; the last of them to finish adds the parts, in their order whoever is last,
so the result does not depend on timing.

Where there is no Gluon that we know (`ahead_kernel`) or no Hopper, `available` is false and others multiply. The
reference is `linear_few.linear_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.ahead_kernel import ahead_kernel
except ImportError:  # another version of Triton
    ahead_kernel = None

_KNOWN_TRITON = "3.6."
"""Gluon is an experiment of Triton's: what it calls things and what they take changes from version to version."""
MOST_ROWS = 256
MOST_SUMS = 384
"""Tiles times rows: half as many registers of every thread."""
_SHARED = 226 << 10
"""Bytes of a program, less a KiB for barriers: the ring's, and what a tile passes through on its way to memory."""
FEATURES, SLAB = 64, 128
"""Features of a tile: what one warp group multiplies at once. Bytes of a slab's row: the widest that the copy engine
lays out."""
_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "float8e4nv"}
_LEAST_BOX = 8
_PARTIALS, _TILES = 5 << 20, 4096
"""Numbers of parts (two of 64 x 256 for each of 132 multiprocessors) and tiles that may have some."""
_WARPS, _LOADING = 4, 24
"""Warps that multiply, and registers of a thread of the loading one."""


@dataclass(frozen=True, slots=True)
class AheadShape:
    """Tiles of a group, stages of the ring, slabs of a turn, programs per multiprocessor (0: one for each group)."""

    tiles: int = 1
    stages: int = 6
    slabs: int = 2
    programs: int = 0

    def bytes_of(self, rows: int) -> int:
        """Shared memory of the ring."""
        return self.stages * self.slabs * (self.tiles * FEATURES + padded(rows)) * SLAB

    def shared(self, rows: int) -> int:
        """With what the sums of a tile pass through, 64 rows of them at a time, if something is added to them."""
        return self.bytes_of(rows) + FEATURES * min(padded(rows), 64) * 4

    def groups(self, features: int) -> int:
        return triton.cdiv(features, self.tiles * FEATURES)


@dataclass(slots=True)
class AheadScratch:
    """Where parts of tiles wait for the others; one for all products of a device, since they run one after another."""

    partial: Tensor
    arrived: Tensor
    """int32: parts of each tile that are done; the last one sets it back to 0."""

    @classmethod
    def allocate(cls, device: torch.device | str, partials: int = _PARTIALS) -> AheadScratch:
        return cls(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(_TILES, dtype=torch.int32, device=device),
        )


def columns(dtype: torch.dtype) -> int:
    """Of a slab."""
    return SLAB // dtype.itemsize


def padded(rows: int) -> int:
    return max(_LEAST_BOX, triton.next_power_of_2(rows))


def is_common(rows: int) -> bool:
    """Whether few kernels serve such numbers of rows: all up to 8 share one, multiples of 16 have one each."""
    return rows <= _LEAST_BOX or rows % 16 == 0


@lru_cache(maxsize=8)
def available(device: torch.device) -> bool:
    """Whether this Triton and this chip have what the kernel needs."""
    known = ahead_kernel is not None and triton.__version__.startswith(_KNOWN_TRITON)
    return known and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(weight: Tensor, sizes: AheadShape) -> int:
    """Never more than there are turns: a program without one would leave a part of nothing."""
    groups = sizes.groups(weight.shape[0])
    turns = groups * (weight.shape[1] // columns(weight.dtype) // sizes.slabs)
    return min(sizes.programs * _multiprocessors(weight.device) if sizes.programs else groups, turns)


def fits(x: Tensor, weight: Tensor, sizes: AheadShape, scratch: AheadScratch) -> bool:
    """Whether the kernel can multiply these: whole turns, a ring that fits, and a place for every part."""
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


def linear_ahead(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    sizes: AheadShape,
    scratch: AheadScratch,
    scales: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features] of up to `MOST_ROWS` rows: x W^T + bias + residual. With `scales` (of features, of rows;
    float32) x W^T is multiplied by both: products of fp8, whose `out` has another type and must be given."""
    rows, width = x.shape
    features, slab = weight.shape[0], columns(x.dtype)
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    kind = getattr(gl, _KINDS[x.dtype])
    pad = padded(rows)
    # The largest box that the rows are a multiple of.
    tile, box = [FEATURES, slab], [max(rows & -rows, _LEAST_BOX), slab]
    sums, stored = _layouts(pad, 32 // x.dtype.itemsize)
    ahead_kernel[(_programs(weight, sizes),)](
        TensorDescriptor.from_tensor(weight, tile, gl.NVMMASharedLayout.get_default_for(tile, kind)),
        TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, kind)),
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
        triton.cdiv(rows, box[0]),
        scales is not None,
        bias is not None,
        residual is not None,
        pdl,
        sums,
        stored,
        num_warps=_WARPS,
        maxnreg=_registers(sizes.tiles * pad),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _registers(sums: int) -> int:
    """Of a thread at the start, before those that multiply take what the loading ones do not need. No more than that:
    the next kernel must find room beside this one, or it cannot begin early."""
    wanted = min(232, (sums // 2 + 80 + 7) // 8 * 8)
    return max((wanted + _LOADING) // 2 // 8 * 8, min(168, (sums // 2 + 40) // 8 * 8))


@lru_cache(maxsize=16)
def _layouts(rows: int, depth: int) -> tuple[Any, Any]:
    """How the sums of a tile [features, rows] lie in registers, and how they are stored: by runs of features. `depth`
    columns are multiplied by one instruction."""
    sums = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, rows, depth])
    return sums, gl.BlockedLayout([8, 1], [8, 4], [1, _WARPS], [0, 1])
