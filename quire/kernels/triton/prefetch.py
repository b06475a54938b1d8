"""Asks for weights before they are needed: the memory is idle while the small kernels between two products run.

The lines go to the second cache; nobody waits for them and nothing is written, so a prefetch changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
_LANES = 32


@triton.jit
def _prefetch_kernel(weight, last, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """One bulk request of CHUNK bytes per lane (sm_90 and later)."""
    place = (tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)) * CHUNK
    address = weight.to(tl.uint64) + tl.minimum(place, last).to(tl.uint64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full([LANES], CHUNK, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch(weight: Tensor, limit: int) -> None:
    """The first `limit` bytes of a contiguous weight, or all of it."""
    size = min(weight.numel() * weight.element_size(), limit) // _CHUNK * _CHUNK
    if size:
        programs = triton.cdiv(size, _CHUNK * _LANES)
        _prefetch_kernel[(programs,)](weight, size - _CHUNK, _CHUNK, _LANES, num_warps=1)
