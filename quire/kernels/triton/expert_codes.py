"""Grouped GEMMs of experts whose weights stay packed: codes become floats inside the product, whatever their format.

All experts of a layer are one weight, one below the other, in planes of bytes (`code_planes` says how they lie and
what a code stands for). Blocks of rows go through their experts as in `expert_linear`; rows are in 16 bits and a weight
is rounded once to their type. A handful of rows goes through `expert_codes_few` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.routing import Clamp
from quire.kernels.triton import code_planes
from quire.kernels.triton.activation import KINDS
from quire.kernels.triton.code_planes import codes_of, numbers_of
from quire.kernels.triton.expert_linear import gate_and_up
from quire.kernels.triton.route import ExpertBlocks


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """The weights [features, width] of some experts, as the kernels read them."""

    pieces: Tensor
    """uint8 [blocks, pieces, experts * features, 32]."""
    scales: Tensor
    """[groups, experts * features]: half precision or float32; of MXFP4 bytes, exponents of two."""
    offsets: Tensor | None
    order: Tensor | None
    """int32 [experts, width]: which number of a row each column is multiplied by; None: its own."""
    features: int
    width: int
    bits: int
    zero: int
    group: int
    numbers: int
    """What codes stand for: one of the kinds of `code_planes`."""

    @property
    def experts(self) -> int:
        return self.pieces.shape[2] // self.features

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.pieces, self.scales, self.offsets, self.order) if each is not None)

    def expert(self, index: int) -> CodedExperts:
        """One of them, where it lies."""
        part = slice(index * self.features, (index + 1) * self.features)
        return replace(
            self, pieces=self.pieces[:, :, part], scales=self.scales[:, part],
            offsets=None if self.offsets is None else self.offsets[:, part],
            order=None if self.order is None else self.order[index : index + 1],
        )  # fmt: skip

    def floats(self) -> Tensor:
        """float32 [experts * features, width]."""
        codes = code_planes.codes_in(self.pieces, self.bits)[:, : self.width]
        scales, offsets = code_planes.scales_in(self.scales, self.numbers).t(), self.offsets
        found = code_planes.numbers_in(codes, self.zero, self.numbers) * _wide(scales, self)
        if offsets is not None:
            found += _wide(offsets.t().float(), self)
        if self.order is None:
            return found
        back = self.order.long().argsort(1).repeat_interleave(self.features, 0)
        return found.gather(1, back)


def _wide(scales: Tensor, weight: CodedExperts) -> Tensor:
    return scales.repeat_interleave(weight.group, 1)[:, : weight.width]


def stacked(experts: Sequence[CodedExperts]) -> CodedExperts:
    """Experts of one format and shape, one below the other."""
    first = experts[0]
    scales = [each.scales for each in experts]
    if len({each.dtype for each in scales}) > 1:
        scales = [each.float() for each in scales]
    offsets = [each.offsets.float() for each in experts if each.offsets is not None]
    if offsets and all(each.offsets is not None and each.offsets.dtype == torch.float16 for each in experts):
        offsets = [each.half() for each in offsets]
    orders = [each.order for each in experts if each.order is not None]
    return replace(
        first, pieces=torch.cat([each.pieces for each in experts], 2).contiguous(), scales=torch.cat(scales, 1),
        offsets=torch.cat(offsets, 1) if offsets else None, order=torch.cat(orders) if orders else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CodedShape:
    """Compile-time sizes: rows of a block, columns of a tile (of gate and of up, each), warps, stages."""

    rows: int = 16
    columns: int = 64
    warps: int = 4
    stages: int = 3


CHOICES = (
    (9.0, CodedShape(16, 64, 4, 4)),
    (22.0, CodedShape(32, 64, 4, 4)),
    (80.0, CodedShape(64, 64, 4, 3)),
    (float("inf"), CodedShape(128, 64, 8, 3)),
)
"""Up to so many rows of an expert, on the average: what both of its GEMMs run with. Not timed yet: bounds and rows are
those of `expert_linear`."""
_COLUMNS_AT_ONCE = 128
"""That an iteration multiplies, where blocks are smaller."""
_BESIDE = 32 << 10
"""Bytes of shared memory that are not of a stage: weights on their way to the tensor cores."""


def coded_shape(pairs: int, weight: CodedExperts, shared: int) -> CodedShape:
    """For so many pairs of rows and experts, with as many stages as fit so many bytes of shared memory."""
    shape = next(shape for most, shape in CHOICES if pairs / weight.experts <= most)
    columns = max(_COLUMNS_AT_ONCE, code_planes.columns_of(weight.bits))
    # Of an iteration: rows in 16 bits, and the codes of gate and up.
    tile = columns * (2 * shape.rows + 2 * shape.columns * weight.bits // 8)
    return replace(shape, stages=max(1, min(shape.stages, (shared - _BESIDE) // tile)))


@triton.jit
def _coded_expert_kernel(
    x, pieces, scales, offsets, order, bias, out, pairs, block_expert, gains, limit, alpha, num_features,
    TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    CLAMPED: tl.constexpr, BIASED: tl.constexpr, ORDERED: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """As `expert_linear._expert_kernel`, of weights in codes. An iteration takes AT_ONCE blocks of BLOCK columns."""
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    LOWS: tl.constexpr = 1 if PIECES == 1 else 4
    HALVES: tl.constexpr = 1 if BITS == 8 else 2
    expert = tl.load(block_expert + tl.program_id(0) // TILES)
    if expert >= 0:
        pair = tl.load(pairs + tl.program_id(0) // TILES * ROWS + tl.arange(0, ROWS))
        real = pair >= 0
        pair = tl.where(real, pair, 0).to(tl.int64)
        column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < N
        lane = tl.arange(0, 32)
        PARTS: tl.constexpr = 2 if GATED else 1
        first = expert * (PARTS * N)
        # Features past the end read the last one, and are not stored: loads of codes need no mask.
        feature = (first + tl.minimum(column, N - 1))[:, None]
        place = pieces + feature.to(tl.int64) * 32 + lane[None, :]
        step = num_features.to(tl.int64) * 32
        if GATED:
            rows = x + (pair // TOP_K)[:, None] * K
        else:
            rows = x + pair[:, None] * K
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        other = tl.zeros([ROWS, COLUMNS], tl.float32)
        for turn in range(0, (BLOCKS + AT_ONCE - 1) // AT_ONCE):
            for index in tl.static_range(AT_ONCE):
                block = turn * AT_ONCE + index
                # A block behind the last is multiplied by zeros.
                start = place + tl.minimum(block, BLOCKS - 1) * PIECES * step
                extra = tl.load(start + 4 * step) if PIECES > 4 else 0
                more = tl.load(start + 5 * step) if PIECES > 5 else 0
                up_extra = tl.load(start + N * 32 + 4 * step) if PIECES > 4 and GATED else 0
                up_more = tl.load(start + N * 32 + 5 * step) if PIECES > 5 and GATED else 0
                for part in tl.static_range(LOWS):
                    low = tl.load(start + part * step)
                    up_low = tl.load(start + N * 32 + part * step) if GATED else 0
                    for half in tl.static_range(HALVES):
                        begin = block * BLOCK + (part + LOWS * half) * 32
                        k = begin + lane
                        if ORDERED:
                            k = tl.load(order + expert * K + k, mask=k < K, other=K)
                        values = tl.load(rows + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
                        code = codes_of(low, extra, more, part + LOWS * half, BITS)
                        w = numbers_of(code, begin, lane[None, :], feature, scales, offsets, num_features, K, ZERO,
                                       GROUP, OFFSETS, NUMBERS)
                        acc = tl.dot(values, tl.trans(w.to(values.dtype)), acc)
                        if GATED:
                            code = codes_of(up_low, up_extra, up_more, part + LOWS * half, BITS)
                            w = numbers_of(code, begin, lane[None, :], feature + N, scales, offsets, num_features, K,
                                           ZERO, GROUP, OFFSETS, NUMBERS)
                            other = tl.dot(values, tl.trans(w.to(values.dtype)), other)
        if BIASED:
            acc += tl.load(bias + first + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if BIASED:
                other += tl.load(bias + first + N + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            found = gate_and_up(acc, other, limit, alpha, KIND, CLAMPED)
        else:
            found = acc * tl.load(gains + pair, mask=real, other=0.0)[:, None]
        target = out + pair[:, None] * N + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def up_coded_experts(
    x: Tensor, weight: CodedExperts, bias: Tensor | None, chosen: Tensor, blocks: ExpertBlocks, kind: str,
    clamp: Clamp | None, sizes: CodedShape,
) -> Tensor:  # fmt: skip
    """`expert_linear.up_experts` of experts in codes, each [2 I, K]."""
    out = torch.empty(chosen.numel(), weight.features // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, chosen, blocks, None, kind, clamp, sizes)
    return out


def down_coded_experts(
    inner: Tensor, weight: CodedExperts, bias: Tensor | None, chosen: Tensor, gains: Tensor, blocks: ExpertBlocks,
    sizes: CodedShape,
) -> Tensor:  # fmt: skip
    """`expert_linear.down_experts` of experts in codes, each [N, I]."""
    out = torch.empty(chosen.numel(), weight.features, dtype=inner.dtype, device=inner.device)
    _launch(inner, weight, bias, out, chosen, blocks, gains, "silu", None, sizes)
    return out


def _launch(
    x: Tensor, weight: CodedExperts, bias: Tensor | None, out: Tensor, chosen: Tensor, blocks: ExpertBlocks,
    gains: Tensor | None, kind: str, clamp: Clamp | None, sizes: CodedShape,
) -> None:  # fmt: skip
    if sizes.rows != blocks.rows:
        raise ValueError(f"blocks of {blocks.rows} rows cannot run in tiles of {sizes.rows}")
    columns = code_planes.columns_of(weight.bits)
    grid = (blocks.expert.numel() * triton.cdiv(out.shape[1], sizes.columns),)
    _coded_expert_kernel[grid](
        x, weight.pieces, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        blocks.expert if weight.order is None else weight.order, x if bias is None else bias, out, blocks.pairs,
        blocks.expert, x if gains is None else gains, 0.0 if clamp is None else clamp.limit,
        0.0 if clamp is None else clamp.alpha, weight.pieces.shape[2], chosen.shape[1], out.shape[1], x.shape[1],
        gains is None, KINDS[kind], clamp is not None, bias is not None, weight.order is not None, weight.bits,
        weight.numbers, weight.zero, weight.group, weight.offsets is not None, sizes.rows, sizes.columns, columns,
        weight.pieces.shape[1], max(1, _COLUMNS_AT_ONCE // columns), num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
