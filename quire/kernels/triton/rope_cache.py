"""Per-head norm of q and k, rotation of both, and the write of k and v to the paged cache, in one pass.

A head's squares are added in one tree, neighbours first, and multiply-adds are fused where the source says so: a decode
attention of deterministic mode that rotates by itself (`head_turn`) has the same bits, whatever it lays out where.
Squares of 16-bit numbers are exact in float32, so it does not matter which of them a compiler fuses with an addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.types import HeadShape, LayerCache

_FEW_TOKENS = 8
_FEW_HEADS, _HEADS = 4, 8
"""Heads of a program. H200, 32 + 16 heads of 128, microseconds at 256 and 8,192 tokens: 4 heads 5.7 and 85, 8 heads
4.9 and 70, 16 heads 5.2 and 72; a single token has too few heads to share out."""


@triton.jit
def _neighbours_first(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The sum of each row of SIZE numbers, a power of two: each with its neighbour, then each of these sums with its
    neighbour."""
    left: tl.constexpr = SIZE // 2
    if left > 1:
        return _neighbours_first(tl.sum(tl.reshape(values, [ROWS, left, 2]), axis=2), ROWS, left)
    else:
        return tl.sum(values, axis=1)


@triton.jit
def in_cache(values, is_k, k_scale, v_scale, SCALED: tl.constexpr):
    """Keys or values as the cache holds them, before they are rounded to its type."""
    if SCALED:
        return values.to(tl.float32) / tl.where(is_k, k_scale, v_scale)
    else:
        return values.to(tl.float32)


@triton.jit
def _rope_cache_kernel(
    qkv,
    k_cache,
    v_cache,
    slots,
    positions,
    rope,
    q_norm,
    k_norm,
    eps,
    kv_scales,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One token, HEADS heads of its q, k and v: features [0, HALF) and [HALF, 2 HALF) turn as pairs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV)
    is_v = (head >= NUM_HEADS + NUM_KV) & (head < NUM_HEADS + 2 * NUM_KV)
    turns = (is_q | is_k)[:, None]
    pair = tl.arange(0, BLOCK_HALF)
    in_pair = (pair < HALF)[None, :] & (turns | is_v[:, None])
    start = qkv + token * (NUM_HEADS + 2 * NUM_KV) * DIM + head[:, None] * DIM
    a = tl.load(start + pair[None, :], mask=in_pair, other=0.0).to(tl.float32)
    b = tl.load(start + HALF + pair[None, :], mask=in_pair, other=0.0).to(tl.float32)
    square = _neighbours_first(a * a, HEADS, BLOCK_HALF) + _neighbours_first(b * b, HEADS, BLOCK_HALF)
    if REST > 0:
        tail = 2 * HALF + tl.arange(0, BLOCK_REST)
        in_tail = (tail < DIM)[None, :] & (turns | is_v[:, None])
        c = tl.load(start + tail[None, :], mask=in_tail, other=0.0).to(tl.float32)
        square += _neighbours_first(c * c, HEADS, BLOCK_REST)
    if NORM_Q or NORM_K:
        mean: tl.constexpr = 1.0 / DIM
        factor = tl.rsqrt(tl.fma(square, mean, eps))[:, None]
        if NORM_Q:
            a = tl.where(is_q[:, None], a * factor * tl.load(q_norm + pair, mask=pair < HALF, other=0.0)[None, :], a)
            b = tl.where(
                is_q[:, None],
                b * factor * tl.load(q_norm + HALF + pair, mask=pair < HALF, other=0.0)[None, :],
                b,
            )
        if NORM_K:
            a = tl.where(is_k[:, None], a * factor * tl.load(k_norm + pair, mask=pair < HALF, other=0.0)[None, :], a)
            b = tl.where(
                is_k[:, None],
                b * factor * tl.load(k_norm + HALF + pair, mask=pair < HALF, other=0.0)[None, :],
                b,
            )
        if REST > 0:
            if NORM_Q:
                gain = tl.load(q_norm + tail, mask=tail < DIM, other=0.0)[None, :]
                c = tl.where(is_q[:, None], c * factor * gain, c)
            if NORM_K:
                gain = tl.load(k_norm + tail, mask=tail < DIM, other=0.0)[None, :]
                c = tl.where(is_k[:, None], c * factor * gain, c)
    if ROTATE:
        row = rope + tl.load(positions + token) * (2 * HALF)
        cos = tl.load(row + pair, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(row + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        turned = tl.fma(a, cos, -(b * sin))
        b = tl.where(turns, tl.fma(b, cos, a * sin), b)
        a = tl.where(turns, turned, a)
    kind = qkv.dtype.element_ty
    if ROTATE or NORM_Q or NORM_K:
        tl.store(start + pair[None, :], a.to(kind), mask=in_pair & turns)
        tl.store(start + HALF + pair[None, :], b.to(kind), mask=in_pair & turns)
        if REST > 0 and (NORM_Q or NORM_K):
            tl.store(start + tail[None, :], c.to(kind), mask=in_tail & turns)
    slot = tl.load(slots + token)
    if slot >= 0:
        page = (slot // PAGE) * NUM_KV
        offset = slot % PAGE
        kv_head = tl.where(is_k, head - NUM_HEADS, head - NUM_HEADS - NUM_KV)
        place = ((page + kv_head) * PAGE + offset).to(tl.int64)[:, None] * DIM
        stored = k_cache.dtype.element_ty
        # Rounded to the activations' type first, so that what a step attends to is what a later one reads.
        k_scale, v_scale = 1.0, 1.0
        if SCALED:
            k_scale = tl.load(kv_scales + kv_head, mask=is_k, other=1.0)[:, None]
            v_scale = tl.load(kv_scales + NUM_KV + kv_head, mask=is_v, other=1.0)[:, None]
        low = in_cache(a.to(kind), is_k[:, None], k_scale, v_scale, SCALED).to(stored)
        high = in_cache(b.to(kind), is_k[:, None], k_scale, v_scale, SCALED).to(stored)
        tl.store(k_cache + place + pair[None, :], low, mask=in_pair & is_k[:, None])
        tl.store(k_cache + place + HALF + pair[None, :], high, mask=in_pair & is_k[:, None])
        tl.store(v_cache + place + pair[None, :], low, mask=in_pair & is_v[:, None])
        tl.store(v_cache + place + HALF + pair[None, :], high, mask=in_pair & is_v[:, None])
        if REST > 0:
            still = in_cache(c.to(kind), is_k[:, None], k_scale, v_scale, SCALED).to(stored)
            tl.store(k_cache + place + tail[None, :], still, mask=in_tail & is_k[:, None])
            tl.store(v_cache + place + tail[None, :], still, mask=in_tail & is_v[:, None])


def rope_and_cache(
    qkv: Tensor,
    cache: LayerCache,
    slots: Tensor,
    positions: Tensor,
    shape: HeadShape,
    rope: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    *,
    pdl: bool = False,
    late: bool = False,
    heads_at_once: int | None = None,
) -> None:
    """In place on qkv; tokens with a negative slot (padding) leave the cache alone.

    The cache is k, v [num_blocks, num_kv_heads, block_size, head_dim], divided by the cache's scales if it has any.
    `late`: the kernel of an early launch (`pdl`) begins when the one before has ended all the same.
    """
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    half = (shape.head_dim if rope is None else rope.shape[1]) // 2
    rest = shape.head_dim - 2 * half
    heads = shape.num_heads + 2 * shape.num_kv_heads
    at_once = heads_at_once or (_FEW_HEADS if tokens <= _FEW_TOKENS else _HEADS)
    launch = {"num_warps": 4, **({"launch_pdl": True} if pdl and not late else {})}
    _rope_cache_kernel[(tokens, triton.cdiv(heads, at_once))](
        qkv,
        cache.k,
        cache.v,
        slots,
        positions,
        qkv if rope is None else rope,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        positions if cache.scales is None else cache.scales,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        half,
        triton.next_power_of_2(max(half, 1)),
        rest,
        triton.next_power_of_2(max(rest, 1)),
        cache.block_size,
        rope is not None,
        q_norm is not None,
        k_norm is not None,
        at_once,
        pdl,
        cache.scales is not None,
        **launch,
    )


def rope_and_cache_reference(
    qkv: Tensor,
    cache: LayerCache,
    slots: Tensor,
    positions: Tensor,
    shape: HeadShape,
    rope: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    turned = shape.num_heads + shape.num_kv_heads
    wide = heads[:, :turned].float()
    norms = [q_norm] * shape.num_heads + [k_norm] * shape.num_kv_heads
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    for h, norm in enumerate(norms):
        if norm is not None:
            wide[:, h] = wide[:, h] * factor[:, h] * norm
    if rope is not None:
        width = rope.shape[1]
        cos, sin = rope[positions.long()].unsqueeze(1).chunk(2, dim=-1)
        a, b = wide[..., :width].chunk(2, dim=-1)
        wide = torch.cat((a * cos - b * sin, b * cos + a * sin, wide[..., width:]), dim=-1)
    heads[:, :turned] = wide.to(qkv.dtype)
    real = slots >= 0
    block, offset = slots[real] // cache.block_size, slots[real] % cache.block_size
    scaled = heads[real, shape.num_heads :].float()
    scaled = (scaled if cache.scales is None else scaled / cache.scales.view(1, -1, 1)).to(cache.k.dtype)
    cache.k[block, :, offset] = scaled[:, : shape.num_kv_heads]
    cache.v[block, :, offset] = scaled[:, shape.num_kv_heads :]
