"""Decode attention of rows with drafts, which read each other's keys, beside rotation and attention apart."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.triton import attention_decode, attention_few, attention_mixed, attention_split, rope_cache
from quire.kernels.types import HeadShape, HeadTurn, LayerCache, pair_cache
from tests.kernels.triton.cases import close, paged_batch

PAGE = 16


def check_drafted_rows(
    device: str, dtype: torch.dtype, shape: HeadShape, sequences: list[tuple[int, int]], *, norms: bool = True,
    window: int | None = None, extra: int = 8, kv_dtype: torch.dtype | None = None, scaled: bool = False,
) -> float:  # fmt: skip
    """Each sequence: its keys in the end, and how many of its rows the step has. No keys: rows of padding. `scaled`: of
    each head of keys and of values another scale."""
    scales = torch.linspace(0.5, 1.5, 2 * shape.num_kv_heads, device=device).view(2, -1) if scaled else None

    def cache_of(k: Tensor, v: Tensor) -> LayerCache:
        return replace(pair_cache(k, v, PAGE), scales=scales)

    ends = [end for end, _ in sequences]
    _, cache, table, _, _ = paged_batch(device, dtype, shape, PAGE, [1] * len(ends), ends)
    cache = cache_of(cache.k.to(kv_dtype or dtype), cache.v.to(kv_dtype or dtype))
    rows = [(number, end - back) for number, (end, count) in enumerate(sequences) for back in reversed(range(count))]
    owner, length = (torch.tensor(part, dtype=torch.int32, device=device) for part in zip(*rows, strict=True))
    real = length > 0
    where = torch.where(real, owner, -1)
    qkv = torch.randn(len(rows), shape.width, device=device).to(dtype)
    angles = torch.rand(max(ends) + 1, shape.head_dim // 2, device=device) * 6
    rope = torch.cat((angles.cos(), angles.sin()), 1)
    gains = [torch.rand(shape.head_dim, device=device) + 0.5 if norms else None for _ in range(2)]
    newest = (length - 1).clamp(min=0).long()
    block = table.long()[owner.long()].gather(1, newest[:, None] // PAGE)[:, 0]
    slots = torch.where(real, block * PAGE + newest % PAGE, -1)
    turned, want_cache = qkv.float(), cache_of(cache.k.clone(), cache.v.clone())
    rope_cache.rope_and_cache_reference(turned, want_cache, slots, newest, shape, rope, *gains, 1e-6)
    turned = turned.to(dtype)
    start = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
    want = attention_mixed.attention_reference(
        turned, want_cache, table[owner.long()], start, length, shape, 0.2, window=window, softcap=None)
    split = attention_split.DecodeSplit.allocate(len(rows), extra, device)
    attention_split.split_decode(split, length, window)
    scratch = attention_decode.DecodeScratch.allocate(split.tasks, len(rows), shape, device)
    out = torch.full((len(rows), shape.num_heads * shape.head_dim), math.nan, dtype=dtype, device=device)
    turn, mine = HeadTurn(rope, *gains, 1e-6), cache_of(cache.k.clone(), cache.v.clone())
    batch = (table, where, length, split, scratch, shape, 0.2)
    attention_few.few_decode_attention(qkv, mine, *batch, turn, window=window, out=out, drafts=True, pdl=True)
    worst = max(close(mine.k.to(dtype), want_cache.k.to(dtype)), close(mine.v.to(dtype), want_cache.v.to(dtype)),
                close(out[real], want[real], 2.0))
    if not bool(out[~real].isnan().all()):
        raise AssertionError("padding was written to")
    return worst
