"""`linear_fixed` for few rows on Hopper: its additions in its order, by a kernel that prefetches the weight.

A sum's bits depend on the order of its additions alone: k in steps of 16 (one tensor core instruction), slices from
zero, the slices' tree. `linear_fixed` and this kernel share that order, whatever their tiles: `python -m
quire.bench.gpu.tune_fixed` found the same bits on an H200 (1 row in every GEMM of 8B, 64 rows without slices), and
tests/gpu/test_bits.py compares them. Deterministic mode calls it for up to `FEW_ROWS` rows unless
`DeviceOptions.fixed_prefetch` is off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quire.kernels.slices import Slices
from quire.kernels.triton import linear_prefetch
from quire.kernels.triton.linear_prefetch import (
    FEATURES,
    SLAB,
    PrefetchScratch,
    columns,
    descriptors,
    layouts,
    multiprocessors,
    padded,
    registers,
)

try:
    from quire.kernels.triton.fixed_prefetch_kernel import fixed_prefetch_kernel
except ImportError:  # another version of Triton
    fixed_prefetch_kernel = None

FEW_ROWS = linear_prefetch.LEAST_BOX
"""Up to so many rows one compiled kernel serves all, since rows are padded to them. At 1 row it was faster than
`linear_fixed` in every GEMM of 8B; at 64 rows faster in one of three, slower in the others (docs/gpu-speed.md). Numbers
between have not been timed."""
_MOST_ROWS, _MOST_SLICED_ROWS = 128, 32
"""What the kernel can do: beyond these the registers hold too few counters."""
_LONGEST_RUN, _MOST_PARTS = 8, 32
_RING, _TURN, _MOST_STAGES = 104 << 10, 32 << 10, 16
"""Shared memory of a ring, such that two programs fit a multiprocessor; bytes of a turn at most."""


@dataclass(frozen=True, slots=True)
class FixedUnits:
    """How a GEMM is dealt out: `run` slices of a tile make a unit, and a tile has `parts` units."""

    run: int
    parts: int
    slice_turns: int
    slabs: int
    stages: int

    def fits(self, x: Tensor, weight: Tensor, scratch: PrefetchScratch) -> bool:
        """Whether the kernel can read these, and the scratch holds the node of every unit."""
        tiles = triton.cdiv(weight.shape[0], FEATURES)
        nodes = 0 if self.parts == 1 else tiles * self.parts * FEATURES * padded(x.shape[0])
        aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and x.is_contiguous()
        known = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
        room = nodes <= scratch.partial.numel() and (not nodes or tiles <= scratch.arrived.numel())
        return known and aligned and room


def units_for(rows: int, weight: Tensor, slices: Slices | None) -> FixedUnits | None:
    """None where this kernel cannot run: slices of unequal length or of no whole slabs, too many rows."""
    count = 1 if slices is None else slices.total
    if rows > (_MOST_ROWS if count == 1 else _MOST_SLICED_ROWS) or not linear_prefetch.is_common(rows):
        return None
    if slices is not None and (not slices.whole or slices.sum_width % (count * slices.unit)):
        return None
    slab = columns(weight.dtype)
    length, rest = divmod(weight.shape[1] // count, slab)
    if rest or weight.shape[1] % count:
        return None
    run = _run(triton.cdiv(weight.shape[0], FEATURES), count, multiprocessors(weight.device))
    if count // run > _MOST_PARTS:
        return None
    slab_bytes = (FEATURES + padded(rows)) * SLAB
    slabs = max(n for n in (1, 2, 4) if n == 1 or (length % n == 0 and n * slab_bytes <= _TURN))
    stages = min(_MOST_STAGES, _RING // (slabs * slab_bytes), max(2, run * length // slabs))
    return FixedUnits(run, count // run, length // slabs, slabs, stages) if stages > 1 else None


def _run(tiles: int, count: int, programs: int) -> int:
    """Slices of a unit: as many as leave a unit for each multiprocessor; a power of two that divides their number."""
    run = min(count & -count, _LONGEST_RUN)
    while run > 1 and tiles * (count // run) < programs:
        run //= 2
    return run


def linear_fixed_prefetch(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *, units: FixedUnits,
    scratch: PrefetchScratch, pdl: bool = False,
) -> Tensor:
    """x W^T + bias + residual with the additions of `linear_fixed.linear_fixed`."""
    rows, features = x.shape[0], weight.shape[0]
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    num_units = triton.cdiv(features, FEATURES) * units.parts
    pad = padded(rows)
    weight_rows, x_rows, boxes = descriptors(weight, x)
    sums, stored = layouts(pad, 32 // x.dtype.itemsize)
    # Besides a slice's own sums the registers hold those of the counter's places.
    places = max(units.run.bit_length(), units.parts.bit_length() if units.parts > 1 else 1)
    fixed_prefetch_kernel[(min(num_units, 2 * multiprocessors(x.device)),)](
        weight_rows,
        x_rows,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        rows,
        features,
        num_units,
        units.stages,
        units.slabs,
        units.slice_turns,
        units.run,
        units.run.bit_length() - 1,
        units.parts,
        units.parts.bit_length() - 1,
        pad,
        boxes,
        bias is not None,
        residual is not None,
        pdl,
        sums,
        stored,
        num_warps=linear_prefetch.WARPS,
        maxnreg=registers((1 + places) * pad),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
