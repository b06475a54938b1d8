"""Prefill attention by tiles that the copy engine loads, run by our interpreter, which also
checks how they wait and refill."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.triton import hopper_prefill
from quire.kernels.triton.attention_mixed import attention_reference
from quire.kernels.types import HeadShape, pair_cache
from tests.kernels.triton import cases
from tests.kernels.triton.gluon_interpreter import interpreting

ORDERS = (range, lambda n: reversed(range(n)), lambda n: random.Random(n).sample(range(n), n))
SEEDS = (None, 1, 2)
EARLIER = ("tables", "rows", "tile_seq", "tile_first", "query_start", "context_len")
"""What the kernel before this one does not write."""
SIZES = (hopper_prefill.PREFILL, hopper_prefill.DECODE, hopper_prefill.PrefillShape(64, 2),
         hopper_prefill.PrefillShape(128, 1, groups=1, programs=2))  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "page", "queries", "contexts", "programs"),
    [
        (HeadShape(4, 2, 128), 16, [64, 130], [0, 0], 3),
        (HeadShape(2, 2, 128), 8, [256], [64], 2),
        (HeadShape(8, 2, 128), 16, [100, 33], [28, 95], 1),
        (HeadShape(16, 1, 128), 32, [72], [56], 4),
        (HeadShape(4, 1, 128), 64, [96, 1, 40], [37, 500, 3], 2),
    ],
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tiles_are_attended_to(
    monkeypatch: pytest.MonkeyPatch, sizes: hopper_prefill.PrefillShape, shape: HeadShape, page: int,
    queries: list[int], contexts: list[int], programs: int,
) -> None:
    """Other requests' keys are poison, also those behind the last key in its block."""
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: programs)
    for order, seed in zip(ORDERS, SEEDS):
        chance = torch.Generator().manual_seed(seed or 0)
        lengths = [n + m for n, m in zip(queries, contexts)]
        most = max(-(-n // page) for n in lengths)
        blocks = 1 + len(queries) * most
        table = 1 + torch.randperm(blocks - 1, generator=chance).int().view(len(queries), most)
        caches = torch.full((2, blocks, shape.num_kv_heads, page, 128), math.nan).bfloat16()
        for seq, length in enumerate(lengths):
            for at in range(length):
                block = int(table[seq, at // page])
                caches[:, block, :, at % page] = torch.randn(2, shape.num_kv_heads, 128, generator=chance).bfloat16()
        cache = pair_cache(caches[0].contiguous(), caches[1].contiguous(), page)
        qkv = torch.randn(sum(queries), shape.width, generator=chance).bfloat16()
        start = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
        length = torch.tensor(lengths, dtype=torch.int32)
        seqs, firsts, taken = hopper_prefill.split_tiles(
            np.array(contexts), np.array(queries), shape, sizes)
        assert len(seqs) and (np.diff(np.array(contexts)[seqs] + firsts) <= 0).all()
        out = torch.full((sum(queries), shape.num_heads * 128), math.nan, dtype=torch.bfloat16)
        mixed = torch.randperm(len(queries), generator=chance).int()
        shuffled = torch.empty_like(table)
        shuffled[mixed.long()] = table
        with interpreting(order, seed, constant=("weight",)):
            hopper_prefill.hopper_prefill(
                qkv, cache, shuffled, mixed, start, length, torch.from_numpy(seqs), torch.from_numpy(firsts), shape,
                0.2, out=out, sizes=sizes)
        want = attention_reference(qkv, cache, table, start, length, shape, 0.2)
        for seq, count in enumerate(taken.tolist()):
            mine = slice(int(start[seq]), int(start[seq]) + count)
            assert torch.allclose(out[mine].float(), want[mine].float(), atol=0.02, rtol=0.02)
            assert out[mine.stop : int(start[seq + 1])].isnan().all()


@pytest.mark.parametrize("stages", [1, 3])
def test_steps_that_decode_leave_out_padding_and_wait_for_the_kernel_before(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """A sequence without keys gets zeros, whatever its row; a tile of no sequence writes nothing."""
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 3)
    shape, lengths = HeadShape(8, 2, 128), [130, 0, 128, 5, 400]
    sizes = hopper_prefill.PrefillShape(128, stages, groups=1)
    qkv, cache, table, start, length = cases.paged_batch("cpu", torch.bfloat16, shape, 16, [1] * 5, lengths)
    rows = torch.tensor([0, -(1 << 20), 2, 3, 4], dtype=torch.int32)
    tiles = torch.tensor([0, 1, 2, -1, 4], dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    for order, seed in zip(ORDERS, SEEDS):
        out = torch.full((5, 8 * 128), math.nan, dtype=torch.bfloat16)
        with interpreting(order, seed, constant=EARLIER):
            hopper_prefill.hopper_prefill(
                qkv, cache, table, rows, start, length, *tiles, shape, 0.2, out=out, sizes=sizes, pdl=True)
        want = attention_reference(qkv, cache, table, start, length, shape, 0.2)
        assert torch.allclose(out[[0, 2, 4]].float(), want[[0, 2, 4]].float(), atol=0.02, rtol=0.02)
        assert (out[1] == 0).all() and out[3].isnan().all()


def test_what_the_kernel_does_not_know_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    device, half = torch.device("cuda"), torch.bfloat16
    known = (HeadShape(16, 8, 128), 16)
    monkeypatch.setattr(hopper_prefill, "available", lambda device: True)
    assert hopper_prefill.fits(device, half, *known) and hopper_prefill.fits(device, torch.float16, *known)
    for shape, page in ((HeadShape(16, 8, 64), 16), (HeadShape(14, 2, 128), 16), (HeadShape(16, 8, 128), 4),
                        (HeadShape(16, 8, 128), 256)):  # fmt: skip
        assert not hopper_prefill.fits(device, half, shape, page)
    assert not hopper_prefill.fits(device, torch.float32, *known)
    assert hopper_prefill.fits(device, half, HeadShape(16, 8, 128), 128, hopper_prefill.DECODE)
    assert not hopper_prefill.fits(device, half, HeadShape(16, 8, 128), 128, hopper_prefill.PrefillShape(64, 5))
    monkeypatch.setattr(hopper_prefill, "available", lambda device: False)
    assert not hopper_prefill.fits(device, half, *known)
