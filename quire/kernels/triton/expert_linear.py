"""Grouped GEMMs of experts: blocks of rows, each through its own expert's weight; and the sum of a token's experts.

Two products make an expert: gate and up with the activation between (`up_experts`), then down, times the pair's weight
(`down_experts`). Rows are taken where they lie, by the token or the pair, so nothing is gathered or scattered between.
With few rows every pair is a block of its own and nothing is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.routing import Clamp
from quire.kernels.triton.activation import KINDS, act_mul_reference, activate
from quire.kernels.triton.route import ExpertBlocks


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Compile-time sizes: rows of a block, columns of a tile, steps of k, warps and stages."""

    rows: int = 16
    columns: int = 64
    depth: int = 64
    warps: int = 4
    stages: int = 3


FEW_PAIRS = 32
"""Up to so many, most experts have one row: sorting would cost more than reading an expert twice."""


def expert_shape(pairs: int, num_experts: int) -> ExpertShape:
    """By the rows that an expert has on the average. Guesses, to be measured on a GPU (`quire bench gpu`)."""
    each = pairs / num_experts
    if each <= 16:
        return ExpertShape(16, 64, 128, 4, 3)
    if each <= 64:
        return ExpertShape(64, 64, 64, 4, 3)
    return ExpertShape(128, 128, 64, 8, 3)


@triton.jit
def _product(rows, weight, real, inside, depth, K: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, acc):
    """acc + rows W^T; `rows` [ROWS, 1] and `weight` [1, COLUMNS] are where each begins."""
    for start in range(0, K, DEPTH):
        k = start + depth
        x = tl.load(rows + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(weight + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _expert_kernel(
    x, weight, bias, out, pairs, block_expert, gains, limit, alpha, TOP_K: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr, BIASED: tl.constexpr,
    SORTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """GATED: out [pairs, N] of rows x[pair // TOP_K], weight [experts, 2 N, K]; else of rows x[pair], weight
    [experts, N, K], times the pair's gain. Without SORTED block b is pair b, of the expert block_expert[b]."""
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert >= 0:
        member = tl.arange(0, ROWS)
        if SORTED:
            pair = tl.load(pairs + block * ROWS + member)
        else:
            pair = tl.where(member == 0, block, -1)
        real = pair >= 0
        pair = tl.where(real, pair, 0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < N
        depth = tl.arange(0, DEPTH)
        zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
        if GATED:
            first = expert.to(tl.int64) * (2 * N)
            rows = x + (pair // TOP_K)[:, None] * K
            place = weight + (first + column)[None, :] * K
            gate = _product(rows, place, real, inside, depth, K, DEPTH, PRECISION, zeros)
            up = _product(rows, place + N * K, real, inside, depth, K, DEPTH, PRECISION, zeros)
            if BIASED:
                gate += tl.load(bias + first + column, mask=inside, other=0.0).to(tl.float32)[None, :]
                up += tl.load(bias + first + N + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            if CLAMPED:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
                found = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
            else:
                found = activate(gate, KIND) * up
        else:
            first = expert.to(tl.int64) * N
            rows = x + pair[:, None] * K
            place = weight + (first + column)[None, :] * K
            found = _product(rows, place, real, inside, depth, K, DEPTH, PRECISION, zeros)
            if BIASED:
                found += tl.load(bias + first + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            found = found * tl.load(gains + pair, mask=real, other=0.0)[:, None]
        target = out + pair[:, None] * N + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def up_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, blocks: ExpertBlocks | None, kind: str,
    clamp: Clamp | None, sizes: ExpertShape,
) -> Tensor:  # fmt: skip
    """[pairs, I]: the gated activation of x [T, K] through weight [experts, 2 I, K], for each pair of int32 `chosen`
    [T, top_k]; `blocks` None: each pair by itself."""
    out = torch.empty(chosen.numel(), weight.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, chosen, blocks, None, kind, clamp, sizes)
    return out


def down_experts(
    inner: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, gains: Tensor, blocks: ExpertBlocks | None,
    sizes: ExpertShape,
) -> Tensor:  # fmt: skip
    """[pairs, N]: inner [pairs, I] through weight [experts, N, I], times float32 `gains` [T, top_k]."""
    out = torch.empty(chosen.numel(), weight.shape[1], dtype=inner.dtype, device=inner.device)
    _launch(inner, weight, bias, out, chosen, blocks, gains, "silu", None, sizes)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, chosen: Tensor, blocks: ExpertBlocks | None,
    gains: Tensor | None, kind: str, clamp: Clamp | None, sizes: ExpertShape,
) -> None:  # fmt: skip
    owner = chosen if blocks is None else blocks.expert
    grid = (owner.numel(), triton.cdiv(out.shape[1], sizes.columns))
    _expert_kernel[grid](
        x, weight, weight if bias is None else bias, out, owner if blocks is None else blocks.pairs, owner,
        x if gains is None else gains, 0.0 if clamp is None else clamp.limit, 0.0 if clamp is None else clamp.alpha,
        chosen.shape[1], out.shape[1], x.shape[1], gains is None, KINDS[kind], clamp is not None, bias is not None,
        blocks is not None, sizes.rows, sizes.columns, sizes.depth, "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip


@triton.jit
def _sum_kernel(found, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(TOP_K):
        total += tl.load(found + (token * TOP_K + index) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def sum_pairs(found: Tensor, top_k: int) -> Tensor:
    """[T, N]: the sum of each token's pairs [T * top_k, N], in their order."""
    out = torch.empty(found.shape[0] // top_k, found.shape[1], dtype=found.dtype, device=found.device)
    if out.numel():
        _sum_kernel[(out.shape[0], triton.cdiv(out.shape[1], 1024))](
            found, out, out.shape[1], top_k, 1024, num_warps=4
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
