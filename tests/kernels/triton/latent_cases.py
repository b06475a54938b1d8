"""Decode attention over latents by TMA and wgmma beside its reference, for the interpreter and for a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.triton.attention_decode import DecodeScratch
from quire.kernels.triton.attention_split import DecodeSplit, split_decode_reference
from quire.kernels.triton.latent_attention import latent_reference
from quire.kernels.triton.latent_hopper import hopper_decode
from quire.kernels.types import LatentShape, LayerCache


def hopper_difference(
    device: str, shape: LatentShape, page: int, lengths: Sequence[int], extra: int, *,
    dtype: torch.dtype = torch.bfloat16, rows: bool = False,
) -> float:  # fmt: skip
    """From the reference, relative. Unused slots of the cache hold NaN, and so does scratch before it is written."""
    torch.manual_seed(1)
    nan, count, room = float("nan"), len(lengths), -(-max(lengths) // page)
    length = torch.tensor(lengths, dtype=torch.int32, device=device)
    table = torch.randperm(count * room).int().view(count, room)
    kept = torch.randn(count * room, 1, page, shape.width).to(dtype)
    for row, size in zip(table.long(), lengths, strict=True):
        kept[row] = kept[row].masked_fill((torch.arange(room * page) >= size).view(room, 1, page, 1), nan)
    cache = LayerCache(shape.kv, page, {"latent": kept.to(device)})
    q = (torch.randn(count, shape.num_heads * shape.width) * 0.3).to(device, dtype)
    split = DecodeSplit.allocate(count, extra, device)
    split.piece.fill_(-7)
    split_decode_reference(split, length, None)
    scratch = DecodeScratch.allocate(split.tasks, count, shape.blocks, device)
    scratch.partial.fill_(nan)
    scratch.summary.fill_(nan)
    out = torch.full((count, shape.num_heads * shape.rank), nan, dtype=dtype, device=device)
    where, table = torch.randperm(count, device=device), table.to(device)
    tables = torch.empty_like(table)
    tables[where] = table
    hopper_decode(
        q, cache, tables if rows else table, where.int() if rows else None, length, split, scratch, shape, 0.1,
        out=out, pdl=True,
    )  # fmt: skip
    assert not scratch.arrived.any(), "the joiner leaves its counters as it found them"
    start = torch.arange(count + 1, dtype=torch.int32, device=device)
    want = latent_reference(q, cache, table, start, length, shape, 0.1).float()
    used = length > 0
    return float((out.float() - want)[used].norm() / want[used].norm())
