"""Decode attention over latents by TMA and wgmma, run by our interpreter, which also checks how its warps wait."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.triton.attention_decode import DecodeScratch
from quire.kernels.triton.attention_split import DecodeSplit, split_decode_reference
from quire.kernels.triton.latent_attention import latent_reference
from quire.kernels.triton.latent_hopper import fits, hopper_decode
from quire.kernels.types import LatentShape, LayerCache
from tests.kernels.triton.gluon_interpreter import interpreting

OLDER = ("tables", "rows", "context_len", "task_seq", "task_piece", "piece_count", "piece_length")
"""Parameters that the previous kernel does not write."""
FEW, MIDDLE, MANY = LatentShape(4, 128, 64), LatentShape(24, 128, 64), LatentShape(128, 128, 64)


def difference(
    shape: LatentShape, page: int, lengths: Sequence[int], extra: int, *, dtype: torch.dtype = torch.bfloat16,
    seed: int | None = None, backwards: bool = False, rows: bool = False,
) -> float:  # fmt: skip
    """From the reference, relative. Unused slots of the cache hold NaN, and so does scratch before it is written."""
    torch.manual_seed(1)
    nan, count, room = float("nan"), len(lengths), -(-max(lengths) // page)
    length = torch.tensor(lengths, dtype=torch.int32)
    table = torch.randperm(count * room).int().view(count, room)
    kept = torch.randn(count * room, 1, page, shape.width).to(dtype)
    for row, size in zip(table.long(), lengths, strict=True):
        kept[row] = kept[row].masked_fill((torch.arange(room * page) >= size).view(room, 1, page, 1), nan)
    cache = LayerCache(shape.kv, page, {"latent": kept})
    q = (torch.randn(count, shape.num_heads * shape.width) * 0.3).to(dtype)
    split = DecodeSplit.allocate(count, extra, "cpu")
    split.piece.fill_(-7)
    split_decode_reference(split, length, None)
    scratch = DecodeScratch.allocate(split.tasks, count, shape.blocks, "cpu")
    scratch.partial.fill_(nan)
    scratch.summary.fill_(nan)
    out = torch.full((count, shape.num_heads * shape.rank), nan, dtype=dtype)
    where = torch.randperm(count)
    tables = torch.empty_like(table)
    tables[where] = table
    order = (lambda n: reversed(range(n))) if backwards else range
    with interpreting(order, seed, OLDER):
        hopper_decode(
            q, cache, tables if rows else table, where.int() if rows else None, length, split, scratch, shape, 0.1,
            out=out, pdl=True,
        )  # fmt: skip
    assert not scratch.arrived.any(), "the joiner leaves its counters as it found them"
    want = latent_reference(q, cache, table, torch.arange(count + 1, dtype=torch.int32), length, shape, 0.1).float()
    used = length > 0
    return float((out.float() - want)[used].norm() / want[used].norm())


@pytest.mark.parametrize(
    ("shape", "page", "lengths", "extra", "options"),
    [
        (FEW, 16, [1, 200, 0, 77, 300], 8, {}),
        (FEW, 8, [1, 200, 64, 300], 1, {"seed": 1, "backwards": True, "dtype": torch.float16}),
        (FEW, 128, [130, 65], 3, {"rows": True, "seed": 2}),
        (MIDDLE, 24, [150], 1, {"seed": 3}),
        (MANY, 64, [130, 64], 3, {"seed": 2}),
        (MANY, 16, [300, 13], 3, {"backwards": True, "rows": True}),
    ],
)
def test_decode_agrees(shape: LatentShape, page: int, lengths: list[int], extra: int, options: dict) -> None:
    assert difference(shape, page, lengths, extra, **options) < 4e-3


def test_lengths_and_splits_of_any_kind_agree() -> None:
    chance = random.Random(3)
    for seed in range(6):
        lengths = [chance.choice((1, 63, 64, 65, 128, chance.randrange(400))) for _ in range(3)]
        found = difference(FEW, 16, [*lengths, 5], chance.randrange(1, 12), seed=seed, backwards=bool(seed % 2))
        assert found < 4e-3, (seed, lengths)


def test_models_and_caches_that_it_serves() -> None:
    half = torch.bfloat16
    assert fits(LatentShape(128, 512, 64), half, 16) and fits(LatentShape(6, 512, 64), torch.float16, 8)
    assert not fits(LatentShape(128, 512, 64), torch.float32, 16)
    assert not fits(LatentShape(128, 512, 32), half, 16) and not fits(LatentShape(128, 384, 64), half, 16)
    assert not fits(LatentShape(128, 512, 64), half, 4) and not fits(LatentShape(128, 512, 64), half, 1)
