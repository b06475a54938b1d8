"""One row times a weight of 4-bit codes (W4A16), bound by reading the codes; norm, gate, bias and residual are fused.

The weight lies as `linear_codes` packs it: 16 features are four rows of words, one after another, of which a warp reads
128 bytes each for 64 columns. A program owns 16 features or a few times as many (with a gate: as many of each half),
so no sums of other programs are waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.triton.activation import KINDS
from quire.kernels.triton.linear_codes import COLUMNS, PackedCodes

try:
    from triton.experimental.gluon import language as gl

    from quire.kernels.triton.codes_row_kernel import codes_row_kernel
except ImportError:  # another version of Triton
    codes_row_kernel = None

_UNIT = 16
"""Features that the tensor cores multiply at once."""
_MOST_RUN = 256
"""Columns whose products add up to less than 2 ** 22."""
_DIGITS = 4
_REGISTERS = 1 << 16
"""Of a multiprocessor."""
_SHARED = 200 << 10


@dataclass(frozen=True, slots=True)
class CodesRowShape:
    """Features of a program at a time (with a gate: pairs of them), warps, times, turns loaded before the first is
    multiplied, and how many programs a multiprocessor must have registers for (0: as the compiler has it)."""

    features: int = 16
    warps: int = 8
    steps: int = 1
    ahead: int = 8
    programs: int = 0

    @property
    def registers(self) -> int | None:
        """Of a thread at most."""
        return _REGISTERS // (self.programs * self.warps * 32) // 8 * 8 if self.programs else None


def run_of(weight: PackedCodes) -> int:
    """Columns that a warp multiplies at once: they share a scale."""
    return min(weight.group & -weight.group, _MOST_RUN)


def turns(weight: PackedCodes, sizes: CodesRowShape) -> int:
    """Of all columns, a run of them to each warp at a time."""
    return weight.width // (sizes.warps * run_of(weight))


def fits(weight: PackedCodes, sizes: CodesRowShape, gated: bool = False) -> bool:
    """Whether the kernel can multiply it: whole turns, whole tiles of each half, and room for the row's digits."""
    whole = weight.width % (sizes.warps * run_of(weight)) == 0 and weight.group % COLUMNS == 0
    halves = not gated or weight.features % (2 * sizes.features) == 0
    return whole and halves and _DIGITS * weight.width <= _SHARED


def linear_codes_row(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
    out: Tensor | None = None,
    sizes: CodesRowShape = CodesRowShape(),
    pdl: bool = False,
) -> Tensor:
    """[1, features]: norm(x) W^T + bias, or act(first half) * second half of it; without a gate + residual."""
    features = weight.features // (2 if gated else 1)
    if out is None:
        out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    tiles, slabs = triton.cdiv(features, sizes.features), run_of(weight) // COLUMNS
    codes_row_kernel[(triton.cdiv(tiles, sizes.steps),)](
        weight.words,
        weight.scales,
        x,
        x if norm is None else norm,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        tiles,
        features,
        weight.width,
        weight.group,
        slabs,
        sizes.features // _UNIT,
        sizes.warps,
        sizes.steps,
        sizes.ahead,
        weight.offsets,
        bias is not None,
        residual is not None,
        norm is not None,
        gated is not None,
        KINDS[gated or "silu"],
        pdl,
        *_layouts(sizes.warps, slabs),
        num_warps=sizes.warps,
        maxnreg=sizes.registers,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@lru_cache(maxsize=16)
def _layouts(warps: int, slabs: int) -> tuple[Any, ...]:
    """How words, sums, the second operand's digits, the row (as it is, and in the digits' order), what warps tell one
    another and the outputs lie in registers; and what of that lies in shared memory."""
    each = [1 << bit for bit in range(warps.bit_length() - 1)]
    words = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 1, 32], [warps, 1, 1, 1], [3, 2, 1, 0])
    sums = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    # A thread has 16 columns of a slab (as of the codes) and one digit; the operand has eight columns for four digits.
    digits = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1 << bit] for bit in range(4)] + [[0, 1 << bit, 0, 0, 0] for bit in range(slabs // 2)],
        [[0, 0, 0, 0, 16], [0, 0, 0, 0, 32], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0]],
        [[bit, 0, 0, 0, 0] for bit in each], [], [warps, slabs, 2, 4, 64],
    )  # fmt: skip
    # Of the row a thread has the four columns whose codes are one half of a word.
    columns = warps * slabs * COLUMNS
    run = [1 << bit for bit in range((slabs * COLUMNS).bit_length() - 1) if 1 << bit not in (1, 8)]
    lanes, more = [*run[:5], 0][:5], run[5:]
    of_warps = [slabs * COLUMNS * bit for bit in each]
    moved = {0: 0, 1: 2, 2: 16, 4: 32, 8: 1, 16: 4, 32: 8}

    def one(registers: list[int], kept: dict[int, int]) -> Any:
        bases = [[[kept.get(bit, bit)] for bit in bits] for bits in (registers, lanes, of_warps)]
        return gl.DistributedLinearLayout(*bases, [], [columns])

    row, ordered = one([1, 8, *more], {}), one([8, 1, *more], moved)
    found = gl.BlockedLayout([warps, 2], [1, 32], [1, warps], [1, 0])
    out = gl.BlockedLayout([warps, 2, 1], [1, 1, 32], [1, 1, warps], [2, 1, 0])
    places = [gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank)))) for rank in (4, 2, 3)]
    return words, sums, digits, row, ordered, found, out, tuple(places)
