"""GEMMs of up to 16 rows whose weights go from memory straight to registers (Hopper); norm, gate, bias and residual
are fused.

Beside `linear_row` it multiplies on the tensor cores, so a row more costs nothing; beside `linear_prefetch` it has no
ring whose beginning and end cost 4 to 5 us of each GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.triton.activation import KINDS
from quire.kernels.triton.codes_row import most_registers

try:
    from triton.experimental.gluon import language as gl

    from quire.kernels.triton.stream_kernel import stream_kernel
except ImportError:  # another version of Triton
    stream_kernel = None

MOST_ROWS = 16
_COLUMN = 8
"""Rows are columns of an MMA, which has eight."""
_HOPPER = 9


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Features of a program at a time (with a gate: pairs of them), columns of a warp at once, warps, times, turns
    loaded before the first is multiplied, and how many programs a multiprocessor must have registers for (0: as the
    compiler has it)."""

    features: int = 16
    run: int = 64
    warps: int = 8
    steps: int = 1
    ahead: int = 4
    programs: int = 0

    @property
    def registers(self) -> int | None:
        """Of a thread at most."""
        return most_registers(self.programs, self.warps)


def available(device: torch.device, dtype: torch.dtype) -> bool:
    if stream_kernel is None or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device)[0] >= _HOPPER


def fits(rows: int, features: int, width: int, sizes: StreamShape, gated: bool = False) -> bool:
    """Whether the kernel can multiply so many rows by a weight [features, width]: whole turns, and with a gate whole
    tiles of each half."""
    whole = width % (sizes.warps * sizes.run) == 0
    return rows <= MOST_ROWS and whole and (not gated or features % (2 * sizes.features) == 0)


def linear_stream(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
    out: Tensor | None = None,
    sizes: StreamShape = StreamShape(),
    pdl: bool = False,
) -> Tensor:
    """[rows, features]: norm(x) W^T + bias, or act(first half) * second half of it, + residual.

    Its reference is `linear_few.linear_reference`.
    """
    rows, width = x.shape
    features = weight.shape[0] // (2 if gated else 1)
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    tiles, columns = triton.cdiv(features, sizes.features), -(-rows // _COLUMN) * _COLUMN
    stream_kernel[(triton.cdiv(tiles, sizes.steps),)](
        weight,
        x,
        x if norm is None else norm,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        x.stride(0),
        rows,
        tiles,
        features,
        width,
        sizes.features,
        columns,
        sizes.run,
        sizes.warps,
        sizes.steps,
        sizes.ahead,
        bias is not None,
        residual is not None,
        norm is not None,
        gated is not None,
        KINDS[gated or "silu"],
        pdl,
        *_layouts(sizes.warps, sizes.features),
        num_warps=sizes.warps,
        maxnreg=sizes.registers,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@lru_cache(maxsize=16)
def _layouts(warps: int, features: int) -> tuple[Any, ...]:
    """How sums and outputs lie in registers, and what warps tell one another in shared memory."""
    sums = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    lanes = min(features, 32)
    out = gl.BlockedLayout([warps, 2, 1, 1], [1, 1, lanes, 32 // lanes], [1, 1, 1, warps], [2, 3, 1, 0])
    places = [gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank)))) for rank in (4, 2)]
    return sums, out, tuple(places)
