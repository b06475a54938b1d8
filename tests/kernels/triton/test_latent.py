"""The kernels of latent attention agree with their torch references (interpreted on a CPU, compiled on a GPU)."""

from __future__ import annotations

import random

import pytest
import torch

from quire.kernels.triton.attention_mixed import MixedShape
from quire.kernels.triton.latent_attention import FEW_HEADS, MANY_HEADS, decode_sizes, latent_pieces
from quire.kernels.types import HeadShape, LatentShape
from tests.kernels.triton import cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)
    random.seed(1)


def test_heads_go_in_blocks_that_divide_them() -> None:
    shapes = [(16, 1), (128, 2), (6, 1), (66, 2)]
    assert [LatentShape(heads, 512, 64).blocks for heads, _ in shapes] == [
        HeadShape(heads, blocks, 512) for heads, blocks in shapes
    ]


def test_tiles_on_their_way_fit_the_shared_memory_of_the_chip() -> None:
    large = LatentShape(128, 512, 64)
    assert decode_sizes(large, 2) == MANY_HEADS and decode_sizes(LatentShape(16, 512, 64), 2) == FEW_HEADS
    assert decode_sizes(large, 2, 163 << 10).keys == 32 and decode_sizes(large, 4).keys == 16


def test_as_many_pieces_for_every_sequence_as_fill_the_chip() -> None:
    few, many = LatentShape(16, 512, 64), LatentShape(128, 512, 64)
    assert [latent_pieces(64, few, 2, 132), latent_pieces(64, many, 1, 132), latent_pieces(200, few, 1, 132)] == [
        256, 64, 132]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_rotation_and_write_agree(dtype: torch.dtype) -> None:
    cases.check_latent_rope(DEVICE, dtype, LatentShape(3, 24, 8), 5, 4)
    cases.check_latent_rope(DEVICE, dtype, LatentShape(1, 32, 6), 2, 16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "block_size", "lengths", "options"),
    [
        (LatentShape(4, 32, 16), 16, [1, 200, 0, 77], {}),
        (LatentShape(6, 24, 8), 4, [300, 70], {"extra": 40, "rows": True}),
        (LatentShape(66, 16, 4), 1, [130], {"extra": 2}),
    ],
)
def test_decode_agrees(
    dtype: torch.dtype, shape: LatentShape, block_size: int, lengths: list[int], options: dict
) -> None:
    cases.check_latent_decode(DEVICE, dtype, shape, block_size, lengths, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "block_size", "queries", "contexts"),
    [
        (LatentShape(4, 32, 16), 16, [5, 1, 40], [0, 50, 13]),
        (LatentShape(6, 24, 8), 4, [17, 3], [40, 0]),
        (LatentShape(66, 16, 4), 3, [2], [7]),
    ],
)
def test_tiles_agree(
    dtype: torch.dtype, shape: LatentShape, block_size: int, queries: list[int], contexts: list[int]
) -> None:
    cases.check_latent_tiles(DEVICE, dtype, shape, block_size, queries, contexts, MixedShape(32, 16, 4, 2))


def test_a_querys_bits_do_not_depend_on_its_tile() -> None:
    """A prompt in one piece, and its end as a chunk: keys are folded at the same places."""
    shape = LatentShape(4, 32, 16)
    q, cache, table, _, length = cases.latent_batch(DEVICE, torch.float32, shape, 16, [40], [40])
    runs = []
    for first in (0, 23):
        count = 40 - first
        seqs, firsts = cases.attention_mixed.query_tiles(cases.np.array([count]), 8)
        runs.append(cases.latent_attention.latent_tiles(
            q[first:].contiguous(), cache, table, None,
            torch.tensor([0, count], dtype=torch.int32, device=DEVICE), length,
            *(torch.from_numpy(part).to(DEVICE) for part in (seqs, firsts)), shape, 0.1,
            sizes=MixedShape(32, 16, 4, 2), exact=True,
        ))
    assert torch.equal(runs[0][23:], runs[1])
