"""One row times a weight of 4-bit codes (W4A16) or of fp8 (W8A16), bound by reading it.

Norm, gate, bias and residual are fused.

Codes lie as `linear_codes` packs them: 16 features are four rows of words, one after another, of which a warp reads 128
bytes each for 64 columns. fp8 lies row by row, and a warp reads 64 bytes of each of 8 features at once. A program owns
16 features or a few times as many (with a gate: as many of each half), so no sums of other programs are waited for.
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
from quire.kernels.triton.linear_prefetch import PrefetchScratch

try:
    from triton.experimental.gluon import language as gl

    from quire.kernels.triton.codes_row_kernel import codes_row_kernel
except ImportError:  # another version of Triton
    codes_row_kernel = None

_UNIT = 16
"""Features that the tensor cores multiply at once."""
_MOST_RUN = 256
"""Columns whose products add up to less than 2 ** 22."""
_LINES = 4
"""Rows of words that hold as many features."""
_BYTES_RUN = 128
"""Columns of fp8 that a warp multiplies at once, and columns of a scale if there are several to a feature."""
_DIGITS = 4
_REGISTERS = 1 << 16
"""Of a multiprocessor."""
_SHARED = 200 << 10


@dataclass(frozen=True, slots=True)
class CodesRowShape:
    """Features of a program at a time (with a gate: pairs of them), warps, times, turns loaded before the first is
    multiplied, how many programs a multiprocessor must have registers for (0: as the compiler has it), turns that come
    to the L2 cache meanwhile, and programs that share the columns of a tile."""

    features: int = 16
    warps: int = 8
    steps: int = 1
    ahead: int = 8
    programs: int = 0
    fetched: int = 0
    parts: int = 1

    @property
    def registers(self) -> int | None:
        """Of a thread at most."""
        return most_registers(self.programs, self.warps)


def most_registers(programs: int, warps: int) -> int | None:
    """Of a thread, where a multiprocessor must have room for so many programs of so many warps; 0: any number."""
    return min(_REGISTERS // (programs * warps * 32) // 8 * 8, 255) if programs else None


def run_of(weight: PackedCodes | Tensor) -> int:
    """Columns that a warp multiplies at once: of codes they share a scale."""
    if isinstance(weight, Tensor):
        return _BYTES_RUN if weight.shape[1] % _BYTES_RUN == 0 else COLUMNS
    return min(weight.group & -weight.group, _MOST_RUN)


def turns(weight: PackedCodes | Tensor, sizes: CodesRowShape) -> int:
    """Of a program's columns, a run of them to each warp at a time; in the last turn some warps may have none."""
    return triton.cdiv(_all_turns(weight, sizes), sizes.parts)


def _all_turns(weight: PackedCodes | Tensor, sizes: CodesRowShape) -> int:
    width = weight.shape[1] if isinstance(weight, Tensor) else weight.width
    return triton.cdiv(width, sizes.warps * run_of(weight))


def _shared_out(
    weight: PackedCodes | Tensor, group: int, sizes: CodesRowShape, fused: bool, scratch: PrefetchScratch | None
) -> bool:
    """Whether several programs can have parts of a tile: with a norm or a gate each would need more than its part."""
    if sizes.parts == 1:
        return True
    tiles = triton.cdiv(weight.shape[0] if isinstance(weight, Tensor) else weight.features, sizes.features)
    return (
        not fused
        and sizes.steps == 1
        and 1 < sizes.parts <= _all_turns(weight, sizes)
        and sizes.warps * run_of(weight) % group == 0
        and scratch is not None
        and tiles <= scratch.arrived.numel()
        and tiles * sizes.parts * sizes.features <= scratch.partial.numel()
    )


def fits(
    weight: PackedCodes, sizes: CodesRowShape, gated: bool = False, normed: bool = False,
    scratch: PrefetchScratch | None = None,
) -> bool:  # fmt: skip
    """Whether the kernel can multiply it: a run for each warp, whole tiles of each half, room for the row's digits, and
    scratch for parts of tiles."""
    shared = sizes.warps * run_of(weight) <= weight.width and weight.group % COLUMNS == 0
    halves = not gated or weight.features % (2 * sizes.features) == 0
    parts = _shared_out(weight, weight.group, sizes, gated or normed, scratch)
    return shared and halves and parts and _DIGITS * turns(weight, sizes) * sizes.warps * run_of(weight) <= _SHARED


def fits_bytes(
    weight: Tensor, scales: Tensor, sizes: CodesRowShape, gated: bool = False, normed: bool = False,
    scratch: PrefetchScratch | None = None,
) -> bool:  # fmt: skip
    """The same of a weight of fp8, with a scale for each feature or for 128 columns of it."""
    features, width = weight.shape
    if not _shared_out(weight, run_of(weight), sizes, gated or normed, scratch):
        return False
    if weight.dtype != torch.float8_e4m3fn or width % COLUMNS or features % (sizes.features * (2 if gated else 1)):
        return False
    scaled = scales.dim() == 1 or width == _BYTES_RUN * scales.shape[1]
    columns = sizes.warps * run_of(weight)
    return scaled and columns <= width and 2 * turns(weight, sizes) * columns <= _SHARED and weight.numel() < 1 << 31


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
    scratch: PrefetchScratch | None = None,
    pdl: bool = False,
) -> Tensor:
    """[1, features]: norm(x) W^T + bias, or act(first half) * second half of it; without a gate + residual."""
    slabs = run_of(weight) // COLUMNS
    of_weight = (weight.features, weight.width, weight.group, weight.offsets, False)
    layouts = _layouts(sizes.warps, slabs, sizes.features // _UNIT * (2 if gated else 1))
    return _launch(x, weight.words, weight.scales, of_weight, layouts, slabs, bias, residual, norm, eps, gated, out,
                   sizes, scratch, pdl)  # fmt: skip


def linear_bytes_row(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
    out: Tensor | None = None,
    sizes: CodesRowShape = CodesRowShape(),
    scratch: PrefetchScratch | None = None,
    pdl: bool = False,
) -> Tensor:
    """The same of a weight [features, width] of fp8 with scales [features] or [features, blocks of 128 columns]."""
    slabs, group = run_of(weight) // COLUMNS, 0 if scales.dim() == 1 else _BYTES_RUN
    of_weight = (*weight.shape, group, False, True)
    layouts = _bytes_layouts(sizes.warps, slabs, sizes.features // _UNIT * (2 if gated else 1))
    return _launch(x, weight.view(torch.int8), scales, of_weight, layouts, slabs, bias, residual, norm, eps, gated, out,
                   sizes, scratch, pdl)  # fmt: skip


def _launch(
    x: Tensor, weight: Tensor, scales: Tensor, of_weight: tuple[int, int, int, bool, bool], layouts: tuple[Any, ...],
    slabs: int, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, eps: float, gated: str | None,
    out: Tensor | None, sizes: CodesRowShape, scratch: PrefetchScratch | None, pdl: bool,
) -> Tensor:  # fmt: skip
    """`of_weight`: features, width, columns of a scale, whether there are offsets, and whether it is of bytes."""
    features, width, group, offsets, is_bytes = of_weight
    features //= 2 if gated else 1
    if out is None:
        out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(features, sizes.features)
    shared = scratch if sizes.parts > 1 else None  # the same kernel with a scratch and without
    codes_row_kernel[(triton.cdiv(tiles, sizes.steps) * sizes.parts,)](
        weight,
        scales,
        x,
        x if norm is None else norm,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        out if shared is None else shared.partial,
        out if shared is None else shared.arrived,
        eps,
        tiles,
        features,
        width,
        group,
        slabs,
        sizes.features // _UNIT,
        sizes.warps,
        sizes.steps,
        sizes.ahead,
        sizes.fetched,
        sizes.parts,
        is_bytes,
        offsets,
        bias is not None,
        residual is not None,
        norm is not None,
        gated is not None,
        KINDS[gated or "silu"],
        pdl,
        *layouts,
        num_warps=sizes.warps,
        maxnreg=sizes.registers,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@lru_cache(maxsize=16)
def _bytes_layouts(warps: int, slabs: int, tiles: int) -> tuple[Any, ...]:
    """The same as `_layouts` for a weight of fp8."""
    each = [1 << bit for bit in range(warps.bit_length() - 1)]
    run = slabs * COLUMNS
    more = [1 << bit for bit in range(6, run.bit_length() - 1)]
    # 16 bytes of a feature to a thread, 64 to the four threads that have one feature's operand.
    words = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [warps, 1, 1], [2, 1, 0])
    sums = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    floats = gl.DistributedLinearLayout(
        [[0, 1 << bit, 0] for bit in range(4)] + [[0, bit, 0] for bit in more],
        [[0, 16, 0], [0, 32, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], [[bit, 0, 0] for bit in each], [], [warps, run, 8],
    )  # fmt: skip
    row = gl.BlockedLayout([run // 32], [32], [warps], [0])
    return words, sums, floats, row, row, *_common_layouts(warps, 2, _UNIT * tiles)


def _common_layouts(warps: int, rank: int, lines: int) -> tuple[Any, ...]:
    """What warps tell one another, outputs, lines to fetch; and how the row, of so many dimensions, and the former two
    lie in shared memory."""
    found = gl.BlockedLayout([warps], [32], [warps], [0])
    out = gl.BlockedLayout([warps, 2, 1], [1, 1, 32], [1, 1, warps], [2, 1, 0])
    bits = [[1 << bit] for bit in range(lines.bit_length() - 1)]
    few = warps.bit_length() - 1
    each = gl.DistributedLinearLayout(bits[few:], [[0]] * 5, (bits + [[0]] * few)[:few], [], [lines])
    places = [gl.SwizzledSharedLayout(1, 1, 1, list(reversed(range(rank)))) for rank in (rank, 1, 3)]
    return found, out, each, tuple(places)


@lru_cache(maxsize=16)
def _layouts(warps: int, slabs: int, tiles: int) -> tuple[Any, ...]:
    """How words, sums, the second operand's digits and the row (as it is, and in the digits' order) lie in registers;
    and the `_common_layouts`."""
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
    return words, sums, digits, row, ordered, *_common_layouts(warps, 4, _LINES * tiles)
