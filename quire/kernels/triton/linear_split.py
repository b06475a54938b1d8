"""Matrix products of a few dozen rows on tensor cores, split over columns so that every multiprocessor reads weights.

A program multiplies all rows by one strip of output features over one part of the columns. Wide strips read x less
often than narrow ones, but there are fewer of them than multiprocessors; parts make up for it. The program that
finishes a strip last adds the parts, in their order whoever is last, so the result does not depend on timing.

H200, 32 rows, microseconds with a norm before: 6,144 x 4,096 18.9 (the library 19.9), 4,096 x 4,096 14.4 (16.5),
24,576 x 4,096 54.4 (55.9), 4,096 x 12,288 34.7 (35.4). Asking for weights before it may begin made it 4% slower; taking
the gate along gained nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTIALS = 9 << 20
"""float32 numbers that parts leave for whoever adds them: 2 tiles of 256 x 128 for each of 132 multiprocessors."""
_STRIPS = 4096


@dataclass(frozen=True, slots=True)
class SplitShape:
    """Output features of a strip, columns read at once, warps, stages and parts."""

    features: int = 64
    columns: int = 128
    warps: int = 4
    stages: int = 4
    parts: int = 1


@dataclass(slots=True)
class SplitScratch:
    """Where parts leave their sums; one for all products of a device, since they run one after another."""

    partial: Tensor
    arrived: Tensor
    """int32: parts of each strip that are done; the last one sets it back to 0."""

    @property
    def strips(self) -> int:
        return self.arrived.numel()

    @classmethod
    def allocate(cls, device: torch.device | str, partials: int = _PARTIALS) -> SplitScratch:
        return cls(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(_STRIPS, dtype=torch.int32, device=device),
        )


@triton.jit(do_not_specialize=["num_rows"])
def _columns_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    arrived,
    num_rows,
    num_features,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    strip = tl.program_id(0)
    part = tl.program_id(1)
    feature = strip * FEATURES + tl.arange(0, FEATURES)
    real = feature < num_features
    row = tl.arange(0, ROWS)
    used = row < num_rows
    column = tl.arange(0, COLUMNS)
    begin = part * PART
    # Features past the end read the last one: no mask in the way of the loads, and nothing of it is stored.
    start_row = weight + tl.minimum(feature, num_features - 1).to(tl.int64) * WIDTH + begin
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Rows past the end are not read: all programs at one row would wait for one place of the cache.
    x_row = x + row[:, None] * WIDTH + begin
    rows_used = used[:, None]
    acc = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(0, PART, COLUMNS):
        place = (start + column)[None, :]
        if PART % COLUMNS == 0 and WIDTH % PART == 0:
            values = tl.load(x_row + place, mask=rows_used, other=0.0)
            w = tl.load(start_row[:, None] + place, eviction_policy="evict_first")
        else:
            inside = (place < PART) & (begin + place < WIDTH)
            values = tl.load(x_row + place, mask=rows_used & inside, other=0.0)
            w = tl.load(start_row[:, None] + place, mask=inside, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    result = tl.trans(acc)
    stores = used[:, None] & real[None, :]
    target = row[:, None].to(tl.int64) * num_features + feature[None, :]
    last = True
    if PARTS > 1:
        size = num_rows * num_features
        tl.store(partial + part * size + target, result, mask=stores)
        # Every thread's stores come before the one thread's atomic that publishes them.
        tl.debug_barrier()
        last = tl.atomic_add(arrived + strip, 1, sem="acq_rel") == PARTS - 1
    if last:
        if PARTS > 1:
            result = tl.zeros([ROWS, FEATURES], tl.float32)
            for other in range(0, PARTS):
                result += tl.load(partial + other * size + target, mask=stores, other=0.0, cache_modifier=".cg")
            tl.store(arrived + strip, 0)
        if BIAS:
            result += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            result += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
        tl.store(out + target, result.to(out.dtype.element_ty), mask=stores)


def fits(rows: int, features: int, sizes: SplitShape, scratch: SplitScratch | None) -> bool:
    """Whether the parts have a place to leave their sums."""
    if sizes.parts == 1:
        return True
    strips = triton.cdiv(features, sizes.features)
    return (
        scratch is not None
        and sizes.parts * rows * features <= scratch.partial.numel()
        and strips <= scratch.strips
    )


def linear_split(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    sizes: SplitShape,
    scratch: SplitScratch | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features] of up to 128 rows: x W^T + bias + residual."""
    rows, width = x.shape
    features = weight.shape[0]
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    columns = min(sizes.columns, triton.next_power_of_2(width))
    part = triton.cdiv(triton.cdiv(width, sizes.parts), columns) * columns
    parts = triton.cdiv(width, part)
    launch = {"num_warps": sizes.warps, "num_stages": sizes.stages, **({"launch_pdl": True} if pdl else {})}
    _columns_kernel[(triton.cdiv(features, sizes.features), parts)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        out if scratch is None else scratch.partial,
        out if scratch is None else scratch.arrived,
        rows,
        features,
        max(16, triton.next_power_of_2(rows)),
        width,
        part,
        parts,
        sizes.features,
        columns,
        bias is not None,
        residual is not None,
        "ieee" if x.dtype == torch.float32 else "tf32",
        pdl,
        **launch,
    )
    return out
