"""Grouped GEMMs of experts: blocks of rows, each through its own expert's weight; and the sum of a token's experts.

An expert is two GEMMs: gate and up with the activation between (`up_experts`), then down, times the pair's weight
(`down_experts`). Rows are taken where they lie, by the token or the pair, so nothing is gathered or scattered between.
Neighbouring programs take the columns of one block, so that its rows and its expert's weight stay in the L2 cache for
all of them. A handful of rows goes through `expert_few` instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.routing import Clamp
from quire.kernels.triton.activation import KINDS, act_mul_reference, activate
from quire.kernels.triton.route import ExpertBlocks


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Compile-time sizes: rows of a block, columns of a tile (of gate and of up, each), steps of k, warps, stages."""

    rows: int = 16
    columns: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 3
    copied: bool = False
    """Weights come by the copy engine (16-bit types whose rows are a multiple of 16 bytes), not by threads' loads."""


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """What experts that have so many rows each, on the average, run with: gate and up, then down."""

    most: float
    up: ExpertShape
    down: ExpertShape


CHOICES = (
    ExpertChoice(9, ExpertShape(16, 32, 256, 4, 3, True), ExpertShape(16, 64, 128, 4, 3, True)),
    ExpertChoice(22, ExpertShape(32, 64, 128, 4, 3), ExpertShape(32, 64, 128, 4, 4)),
    ExpertChoice(80, ExpertShape(64, 64, 64, 4, 3, True), ExpertShape(64, 128, 64, 8, 4, True)),
    ExpertChoice(500, ExpertShape(128, 128, 64, 8, 4, True), ExpertShape(128, 128, 64, 8, 3, True)),
    ExpertChoice(float("inf"), ExpertShape(128, 128, 64, 8, 3, True), ExpertShape(128, 128, 64, 8, 3, True)),
)
"""By an expert's average rows; both GEMMs use blocks of the same number of rows. Up to 22 rows the weights' bytes
decide, so a block should hold all rows of most experts: of 16 on the average, 4 of 10 have more than 16, none more than
32. H200, 2026-11-16, Qwen3-30B-A3B's experts (`python -m quire.bench.gpu.tune_experts`), gate and up, then down, in
microseconds and of what bytes or FLOPs allow: 32 tokens 178 (93%) and 95 (87%); 256: 196 (96%) and 110 (86%); 512: 205
(92%) and 114 (83%); 2,048: 282 (67%) and 166 (57%); 16,384: 1,372 (78%) and 792 (68%)."""


def expert_choice(pairs: int, num_experts: int) -> ExpertChoice:
    each = pairs / num_experts
    return next(choice for choice in CHOICES if each <= choice.most)


def suited(shape: ExpertShape, gated: bool, element_size: int, shared: int, copy_engine: bool) -> ExpertShape:
    """The same with as many stages, and as deep, as fit so many bytes of shared memory."""
    tile = (shape.rows + (2 if gated else 1) * shape.columns) * shape.depth * element_size
    stages = min(shape.stages, shared * 95 // 100 // tile)
    if stages < 2 and shape.depth > 16:
        return suited(replace(shape, depth=shape.depth // 2), gated, element_size, shared, copy_engine)
    return replace(shape, stages=stages, copied=shape.copied and copy_engine)


@triton.jit
def _expert_kernel(
    x, weight, bias, out, pairs, block_expert, gains, limit, alpha, TOP_K: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr, BIASED: tl.constexpr,
    COPIED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """GATED: out [pairs, N] of rows x[pair // TOP_K], weight [experts, 2 N, K]; else of rows x[pair], weight [experts,
    N, K], times the pair's gain. COPIED: `weight` describes [experts * its rows, K] in tiles [COLUMNS, DEPTH]."""
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert = tl.load(block_expert + block)
    if expert >= 0:
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
        real = pair >= 0
        pair = tl.where(real, pair, 0).to(tl.int64)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < N
        depth = tl.arange(0, DEPTH)
        PARTS: tl.constexpr = 2 if GATED else 1
        first = expert * (PARTS * N)
        if GATED:
            rows = x + (pair // TOP_K)[:, None] * K
        else:
            rows = x + pair[:, None] * K
        if not COPIED:
            place = weight + (first.to(tl.int64) + column)[None, :] * K
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        other = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K, DEPTH):
            k = start + depth
            values = tl.load(rows + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
            if COPIED:
                w = tl.trans(weight.load([first + tile * COLUMNS, start]))
            else:
                loads = inside[None, :] & (k < K)[:, None]
                w = tl.load(place + k[:, None], mask=loads, other=0.0).to(values.dtype)
            acc = tl.dot(values, w, acc, input_precision=PRECISION)
            if GATED:
                if COPIED:
                    w = tl.trans(weight.load([first + N + tile * COLUMNS, start]))
                else:
                    w = tl.load(place + N * K + k[:, None], mask=loads, other=0.0).to(values.dtype)
                other = tl.dot(values, w, other, input_precision=PRECISION)
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


@triton.jit
def gate_and_up(gate, up, limit, alpha, KIND: tl.constexpr, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        found = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        found = activate(gate, KIND) * up
    return found


def up_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, blocks: ExpertBlocks, kind: str,
    clamp: Clamp | None, sizes: ExpertShape,
) -> Tensor:  # fmt: skip
    """[pairs, I]: the gated activation of x [T, K] through weight [experts, 2 I, K], for each pair of int32 `chosen`
    [T, top_k], which stand in blocks of `sizes.rows`."""
    out = torch.empty(chosen.numel(), weight.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, chosen, blocks, None, kind, clamp, sizes)
    return out


def down_experts(
    inner: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, gains: Tensor, blocks: ExpertBlocks,
    sizes: ExpertShape,
) -> Tensor:  # fmt: skip
    """[pairs, N]: inner [pairs, I] through weight [experts, N, I], times float32 `gains` [T, top_k]."""
    out = torch.empty(chosen.numel(), weight.shape[1], dtype=inner.dtype, device=inner.device)
    _launch(inner, weight, bias, out, chosen, blocks, gains, "silu", None, sizes)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, chosen: Tensor, blocks: ExpertBlocks,
    gains: Tensor | None, kind: str, clamp: Clamp | None, sizes: ExpertShape,
) -> None:  # fmt: skip
    if sizes.rows != blocks.rows:
        raise ValueError(f"blocks of {blocks.rows} rows cannot run in tiles of {sizes.rows}")
    copied = sizes.copied and x.element_size() == 2 and x.shape[1] * 2 % 16 == 0
    grid = (blocks.expert.numel() * triton.cdiv(out.shape[1], sizes.columns),)
    _expert_kernel[grid](
        x, _described(weight, sizes) if copied else weight, x if bias is None else bias, out, blocks.pairs,
        blocks.expert, x if gains is None else gains, 0.0 if clamp is None else clamp.limit,
        0.0 if clamp is None else clamp.alpha, chosen.shape[1], out.shape[1], x.shape[1], gains is None, KINDS[kind],
        clamp is not None, bias is not None, copied, sizes.rows, sizes.columns, sizes.depth,
        "ieee" if x.dtype == torch.float32 else "tf32", num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


def _described(weight: Tensor, sizes: ExpertShape) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = weight.view(-1, weight.shape[2])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [sizes.columns, sizes.depth])


@triton.jit
def _sum_kernel(
    found, residual, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(TOP_K):
        total += tl.load(found + (token * TOP_K + index) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def sum_pairs(found: Tensor, top_k: int, residual: Tensor | None = None) -> Tensor:
    """[T, N]: the sum of each token's pairs [T * top_k, N], in their order, and the residual."""
    out = torch.empty(found.shape[0] // top_k, found.shape[1], dtype=found.dtype, device=found.device)
    if out.numel():
        _sum_kernel[(out.shape[0], triton.cdiv(out.shape[1], 1024))](
            found, found if residual is None else residual, out, out.shape[1], top_k, residual is not None, 1024,
            num_warps=4,
        )
    return out


def experts_reference(
    x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, chosen: Tensor,
    gains: Tensor, kind: str, clamp: Clamp | None,
) -> Tensor:  # fmt: skip
    """What the three kernels compute together, in float32, one token at a time."""
    out = torch.zeros(x.shape[0], down.shape[1], device=x.device)
    for token, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            both = up[expert].float() @ x[token].float()
            both = both if up_bias is None else both + up_bias[expert].float()
            if clamp is None:
                inner = act_mul_reference(both[None], kind)[0]
            else:
                gate, high = both.chunk(2)
                gate, high = gate.clamp(max=clamp.limit), high.clamp(-clamp.limit, clamp.limit)
                inner = gate * torch.sigmoid(clamp.alpha * gate) * (high + 1.0)
            found = down[expert].float() @ inner
            found = found if down_bias is None else found + down_bias[expert].float()
            out[token] += found * gains[token, place]
    return out.to(x.dtype)
