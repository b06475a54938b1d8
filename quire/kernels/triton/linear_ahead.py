"""Matrix products that ask for their weights before their rows are there, so that memory never rests between kernels.

One program a multiprocessor walks its share of the weight, tile after tile, through a ring of shared memory that the
copy engine fills. The ring is asked for before the kernel ahead (a norm, a gate, attention) has ended: weights do not
depend on it. What is left of that kernel, and the start of this one, then cost no time of the memory. Shares are equal
to a turn of the ring whatever the shape, so a tile may be computed by several programs; the last of them to finish
adds the parts, in their order whoever is last, so the result does not depend on timing.

Written in Gluon, Triton's lower layer, since Triton itself cannot say when a copy begins. Where there is none (another
version of Triton, no Hopper) `available` is false and others multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # pragma: no cover - another version of Triton
    gluon = None  # type: ignore[assignment]

COLUMNS = 64
"""Of a turn: 128 bytes, the widest row that the copy engine lays out for the tensor cores."""


@dataclass(frozen=True, slots=True)
class AheadShape:
    """Output features of a tile, turns of the ring, warps, programs per multiprocessor."""

    features: int = 128
    stages: int = 6
    warps: int = 4
    programs: int = 1


@gluon.jit
def _ask_weights(weight, ready, ring, turn, stage, asked, KITERS: gl.constexpr, BYTES: gl.constexpr):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    WIDTH: gl.constexpr = weight.block_type.shape[1]
    mbarrier.expect(ready.index(stage), BYTES, pred=asked)
    place = [turn // KITERS * FEATURES, turn % KITERS * WIDTH]
    tma.async_copy_global_to_shared(weight, place, ready.index(stage), ring.index(stage), pred=asked)


@gluon.jit
def _ask_rows(x, ready, ring, turn, stage, asked, KITERS: gl.constexpr):
    WIDTH: gl.constexpr = x.block_type.shape[1]
    place = [0, turn % KITERS * WIDTH]
    tma.async_copy_global_to_shared(x, place, ready.index(stage), ring.index(stage), pred=asked)


@gluon.jit
def _whole_tile(acc, tile, first, last, total, programs, partial, arrived, KITERS: gl.constexpr):
    """(the tile's sum, whether this program has it): at once if it saw all columns, else if it is the last one."""
    FEATURES: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    complete = last - first == KITERS
    if not complete:
        feature = gl.arange(0, FEATURES, layout=gl.SliceLayout(1, acc.type.layout))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, acc.type.layout))
        inside = feature[:, None] * ROWS + row[None, :]
        SIZE: gl.constexpr = FEATURES * ROWS
        # Shares are equal, so a turn tells its program. Whoever has the first turns of a tile keeps them in its second
        # place, all others in their first: a program has at most one part of either kind.
        begin = tile * KITERS
        one = ((begin + 1) * programs - 1) // total
        other = ((begin + KITERS) * programs - 1) // total
        mine = 2 * gl.program_id(0) + (first == begin).to(gl.int32)
        gl.store(partial + mine * SIZE + inside, acc)
        # Every thread's stores come before the one thread's atomic that publishes them.
        gl.thread_barrier()
        complete = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == other - one
        if complete:
            gl.store(arrived + tile, 0)
            acc = gl.load(partial + (2 * one + 1) * SIZE + inside, cache_modifier=".cg")
            for part in range(one + 1, other + 1):
                acc += gl.load(partial + 2 * part * SIZE + inside, cache_modifier=".cg")
    return acc, complete


@gluon.jit
def _store_tile(acc, tile, residual, out, num_rows, num_features, RESIDUAL: gl.constexpr, STORED: gl.constexpr):
    FEATURES: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    feature = tile * FEATURES + gl.arange(0, FEATURES, layout=gl.SliceLayout(1, STORED))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))
    target = row[None, :] * num_features + feature[:, None]
    stores = (feature < num_features)[:, None] & (row < num_rows)[None, :]
    if RESIDUAL:
        result = gl.convert_layout(acc, STORED)
        result += gl.load(residual + target, mask=stores, other=0.0).to(gl.float32)
        gl.store(out + target, result.to(out.dtype.element_ty), mask=stores)
    else:
        gl.store(out + target, gl.convert_layout(acc.to(out.dtype.element_ty), STORED), mask=stores)


@gluon.jit(do_not_specialize=["num_rows"])
def _ahead_kernel(
    weight,
    x,
    residual,
    out,
    partial,
    arrived,
    num_rows,
    num_features,
    KITERS: gl.constexpr,
    STAGES: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    SUMS: gl.constexpr,
    STORED: gl.constexpr,
):
    FEATURES: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    w_ring = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    programs = gl.num_programs(0)
    total = (num_features + FEATURES - 1) // FEATURES * KITERS
    begin = gl.program_id(0) * total // programs
    end = (gl.program_id(0) + 1) * total // programs
    for stage in gl.static_range(STAGES):
        _ask_weights(weight, ready, w_ring, begin + stage, stage, begin + stage < end, KITERS, BYTES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _ask_rows(x, ready, x_ring, begin + stage, stage, begin + stage < end, KITERS)
    for tile in range(begin // KITERS, (end + KITERS - 1) // KITERS):
        first = gl.maximum(begin, tile * KITERS)
        last = gl.minimum(end, (tile + 1) * KITERS)
        acc = gl.zeros((FEATURES, ROWS), gl.float32, SUMS)
        for turn in range(first, last):
            done = turn - begin
            full = done % STAGES
            mbarrier.wait(ready.index(full), done // STAGES & 1)
            acc = warpgroup_mma(w_ring.index(full), x_ring.index(full).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The turn before this one has been read: its place may be filled.
            after = turn - 1 + STAGES
            asked = (done > 0) & (after < end)
            free = (done + STAGES - 1) % STAGES
            _ask_weights(weight, ready, w_ring, after, free, asked, KITERS, BYTES)
            _ask_rows(x, ready, x_ring, after, free, asked, KITERS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc, complete = _whole_tile(acc, tile, first, last, total, programs, partial, arrived, KITERS)
        if complete:
            _store_tile(acc, tile, residual, out, num_rows, num_features, RESIDUAL, STORED)


@lru_cache(maxsize=8)
def available(device: torch.device) -> bool:
    """Whether this Triton and this chip have what the kernel needs."""
    return gluon is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def fits(rows: int, features: int, width: int, sizes: AheadShape, partials: int, strips: int) -> bool:
    """Whether the kernel can multiply these, with so many places for parts and for counts."""
    tile = sizes.features * padded(rows)
    return (
        width % COLUMNS == 0
        and rows <= 256
        and 2 * 264 * tile <= partials
        and triton.cdiv(features, sizes.features) <= strips
    )


def linear_ahead(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    sizes: AheadShape,
    partial: Tensor,
    arrived: Tensor,
    out: Tensor | None = None,
    pdl: bool = False,
    programs: int = 0,
) -> Tensor:
    """[rows, features] of up to 256 rows: x W^T + residual."""
    rows, width = x.shape
    features = weight.shape[0]
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    pad = padded(rows)
    w_block, x_block = [sizes.features, COLUMNS], [pad, COLUMNS]
    sums, stored = _layouts(sizes.features, pad, sizes.warps)
    _ahead_kernel[((programs or _multiprocessors(x.device) * sizes.programs),)](
        TensorDescriptor.from_tensor(weight, w_block, gl.NVMMASharedLayout.get_default_for(w_block, kind)),
        TensorDescriptor.from_tensor(x, x_block, gl.NVMMASharedLayout.get_default_for(x_block, kind)),
        x if residual is None else residual,
        out,
        partial,
        arrived,
        rows,
        features,
        width // COLUMNS,
        sizes.stages,
        residual is not None,
        pdl,
        sums,
        stored,
        num_warps=sizes.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@lru_cache(maxsize=64)
def _layouts(features: int, rows: int, warps: int) -> tuple:
    """How the sums of a tile [features, rows] lie in registers, and how they are stored: by runs of features."""
    sums = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, min(rows, 256), 16])
    stored = gl.BlockedLayout([8, 1], [min(32, features // 8), 32 // min(32, features // 8)], [1, warps], [0, 1])
    return sums, stored
