"""Matrix products that ask for their weights before their rows are there, so that memory never rests between kernels.

One program a multiprocessor walks its share of the weight, tile after tile, through a ring of shared memory that the
copy engine fills. The ring is asked for before the kernel ahead (a norm, a gate, attention) has ended: weights do not
depend on it. What is left of that kernel, and the start of this one, then cost no time of the memory. Shares are equal
to a turn of the ring whatever the shape, so a tile may be computed by several programs; the last of them to finish
adds the parts, in their order whoever is last, so the result does not depend on timing.

Where there is no Gluon (`ahead_kernel`) or no Hopper, `available` is false and others multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.triton.linear_split import SplitScratch

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.ahead_kernel import ahead_kernel
except ImportError:  # another version of Triton
    ahead_kernel = None

MOST_ROWS = 256
_SHARED = 220 << 10
"""Bytes of a ring at most: beside it lie barriers and what a tile passes through on its way to memory."""
COLUMNS = 64
"""Of a turn: 128 bytes, the widest row that the copy engine lays out for the tensor cores."""


@dataclass(frozen=True, slots=True)
class AheadShape:
    """Output features of a tile, turns of the ring, slabs of a turn, warps, programs per multiprocessor (0: one for
    each tile)."""

    features: int = 128
    stages: int = 6
    slabs: int = 1
    warps: int = 4
    programs: int = 1

    def bytes_of(self, rows: int) -> int:
        """Shared memory of the ring in a 16-bit type."""
        return self.stages * self.slabs * (self.features + padded(rows)) * COLUMNS * 2


def padded(rows: int) -> int:
    return max(8, triton.next_power_of_2(rows))


@lru_cache(maxsize=8)
def available(device: torch.device) -> bool:
    """Whether this Triton and this chip have what the kernel needs."""
    return ahead_kernel is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(weight: Tensor, sizes: AheadShape) -> int:
    """Never more than there are turns: a program without one would leave a part of nothing."""
    tiles = triton.cdiv(weight.shape[0], sizes.features)
    turns = tiles * (weight.shape[1] // COLUMNS // sizes.slabs)
    return min(sizes.programs * _multiprocessors(weight.device) or tiles, turns)


def fits(x: Tensor, weight: Tensor, sizes: AheadShape, scratch: SplitScratch) -> bool:
    """Whether the kernel can multiply these: whole turns, a ring that fits, and a place for every part."""
    rows, width = x.shape
    programs = _programs(weight, sizes)
    tiles = triton.cdiv(weight.shape[0], sizes.features)
    parts = 0 if tiles == programs else 2 * programs * sizes.features * padded(rows)
    return (
        rows <= MOST_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and width % (COLUMNS * sizes.slabs) == 0
        and sizes.bytes_of(rows) <= _SHARED
        and parts <= scratch.partial.numel()
        and tiles <= scratch.strips
        and programs * tiles * (width // COLUMNS // sizes.slabs) < 1 << 31
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
    )


def linear_ahead(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    sizes: AheadShape,
    scratch: SplitScratch,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features] of up to `MOST_ROWS` rows: x W^T + residual."""
    rows, width = x.shape
    features = weight.shape[0]
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    pad = padded(rows)
    tile, slab = [sizes.features, COLUMNS], [pad, COLUMNS]
    sums, stored = _layouts(sizes.features, pad, sizes.warps)
    ahead_kernel[(_programs(weight, sizes),)](
        TensorDescriptor.from_tensor(weight, tile, gl.NVMMASharedLayout.get_default_for(tile, kind)),
        TensorDescriptor.from_tensor(x, slab, gl.NVMMASharedLayout.get_default_for(slab, kind)),
        x if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        rows,
        features,
        width // COLUMNS // sizes.slabs,
        sizes.stages,
        sizes.slabs,
        residual is not None,
        pdl,
        sums,
        stored,
        num_warps=sizes.warps,
        maxnreg=_registers(sizes, pad),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _registers(sizes: AheadShape, rows: int) -> int:
    """Of a thread at the start, before those that multiply take what the loading ones do not need. No more than that:
    the next kernel must find room beside this one, or it cannot begin early."""
    sums = sizes.features * rows // (32 * sizes.warps)
    wanted = min(232, (sums + 80 + 7) // 8 * 8)
    threads = 32 * sizes.warps
    return max(-(-(wanted * threads + 24 * 128) // (threads + 128) // 8) * 8, min(168, (sums + 40) // 8 * 8))


@lru_cache(maxsize=64)
def _layouts(features: int, rows: int, warps: int) -> tuple[Any, Any]:
    """How the sums of a tile [features, rows] lie in registers, and how they are stored: by runs of features."""
    lanes = features // 8
    sums = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])
    return sums, gl.BlockedLayout([8, 1], [min(32, lanes), 32 // min(32, lanes)], [1, warps], [0, 1])
