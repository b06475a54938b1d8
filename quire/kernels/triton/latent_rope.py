"""Rotates the turning part of queries and latents, and writes the step's latents to the paged cache: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.types import LatentShape, LayerCache


@triton.jit
def _kernel(
    q, kv, latents, rope, positions, slots, q_stride, kv_stride, rope_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    real = half < ROPE // 2
    angles = rope + tl.load(positions + token) * rope_stride + half
    cos = tl.load(angles, mask=real, other=0.0)
    sin = tl.load(angles + ROPE // 2, mask=real, other=0.0)
    slot = tl.load(slots + token)
    place = kv + token * kv_stride + RANK + half
    if head < HEADS:
        place = q + token * q_stride + head * (RANK + ROPE) + RANK + half
    a = tl.load(place, mask=real, other=0.0).to(tl.float32)
    b = tl.load(place + ROPE // 2, mask=real, other=0.0).to(tl.float32)
    low, high = a * cos - b * sin, b * cos + a * sin
    tl.store(place, low.to(q.dtype.element_ty), mask=real)
    tl.store(place + ROPE // 2, high.to(q.dtype.element_ty), mask=real)
    if head == HEADS and slot >= 0:
        kept = latents + slot * (RANK + ROPE) + RANK + half
        tl.store(kept, low.to(latents.dtype.element_ty), mask=real)
        tl.store(kept + ROPE // 2, high.to(latents.dtype.element_ty), mask=real)
        dim = tl.arange(0, BLOCK_RANK)
        latent = tl.load(kv + token * kv_stride + dim, mask=dim < RANK, other=0.0)
        tl.store(latents + slot * (RANK + ROPE) + dim, latent.to(latents.dtype.element_ty), mask=dim < RANK)


def rope_latents(
    q: Tensor, kv: Tensor, cache: LayerCache, slots: Tensor, positions: Tensor, shape: LatentShape, rope: Tensor
) -> None:
    """In place on q [T, heads * width] and kv [T, width]; a token whose slot is negative is not written (padding)."""
    _kernel[(q.shape[0], shape.num_heads + 1)](
        q, kv, cache.latents, rope, positions, slots, q.stride(0), kv.stride(0), rope.stride(0), shape.num_heads,
        shape.rank, triton.next_power_of_2(shape.rank), shape.rope_dim, triton.next_power_of_2(shape.rope_dim // 2),
    )  # fmt: skip


def rope_latents_reference(
    q: Tensor, kv: Tensor, cache: LayerCache, slots: Tensor, positions: Tensor, shape: LatentShape, rope: Tensor
) -> None:
    cos, sin = rope[positions].unsqueeze(1).chunk(2, -1)
    for part in (q.view(q.shape[0], -1, shape.width), kv.view(kv.shape[0], 1, shape.width)):
        a, b = part[..., shape.rank :].float().chunk(2, -1)
        part[..., shape.rank :] = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(part.dtype)
    written = slots >= 0
    rows = cache.latents.view(-1, shape.width)
    rows[slots[written]] = kv[written].to(rows.dtype)
