"""Contexts in fp8, unpacked for the kernel of prompts: which pages, where they go, and what is attended to."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.triton import hopper_prefill, unpacked_pages
from quire.kernels.triton.attention_mixed import attention_reference
from quire.kernels.triton.unpacked_pages import LEAST_QUERIES, PageRoom, UnpackedPages, choose_pages
from quire.kernels.types import HeadShape, LayerCache, pair_cache
from tests.kernels.triton.gluon_interpreter import interpreting


def chosen_of(starts: list[int], counts: list[int], page: int, room: int) -> UnpackedPages:
    return UnpackedPages(*map(torch.from_numpy, choose_pages(np.array(starts), np.array(counts), page, room)))


def test_chunks_are_chosen_as_long_as_there_is_room_and_short_ones_are_not() -> None:
    few = LEAST_QUERIES - 1
    found = chosen_of([100, 0, 50, 500, 9], [few, 33, 50, 40, 39], 16, 13)
    # Pages: none, 3, 7, 34 (which do not fit), 3.
    assert found.sequence.tolist() == [1] * 3 + [2] * 7 + [4] * 3
    assert found.first[[1, 2, 4]].tolist() == [0, 3, 10]
    assert len(chosen_of([100], [40], 16, 8).sequence) == 0 and len(chosen_of([100], [40], 16, 9).sequence) == 9


@pytest.mark.parametrize("tokens", [1000, 1 << 30])
def test_a_room_is_no_larger_than_the_contexts_nor_than_its_bound(tokens: int) -> None:
    shape, page = HeadShape(32, 8, 128), 16
    room = PageRoom.allocate(shape, page, tokens, torch.bfloat16, "meta")
    assert room.pages == (63 if tokens == 1000 else 131072 // page)
    assert room.k.nbytes + room.v.nbytes <= unpacked_pages.MOST_BYTES
    assert room.takes(shape, page) and not room.takes(shape, 32) and not room.takes(HeadShape(32, 4, 128), page)


def batch(
    shape: HeadShape, page: int, lengths: list[int], other: float
) -> tuple[LayerCache, torch.Tensor, torch.Tensor]:
    """A cache in fp8 with `other` where no sequence has a key, its table, and the rows of it."""
    most = max(-(-length // page) for length in lengths)
    blocks = 1 + len(lengths) * most
    table = 1 + torch.randperm(blocks - 1).int().view(len(lengths), most)
    parts = torch.full((2, blocks, shape.num_kv_heads, page, shape.head_dim), other)
    for seq, length in enumerate(lengths):
        for at in range(length):
            parts[:, int(table[seq, at // page]), :, at % page] = torch.randn(2, shape.num_kv_heads, shape.head_dim)
    narrow = parts.to(torch.float8_e4m3fn)
    cache = pair_cache(narrow[0].contiguous(), narrow[1].contiguous(), page)
    cache.scales = torch.linspace(0.5, 1.5, 2 * shape.num_kv_heads).view(2, -1)
    rows = torch.randperm(len(lengths)).int()
    shuffled = torch.empty_like(table)
    shuffled[rows.long()] = table
    return cache, shuffled, rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "page"), [(HeadShape(6, 3, 128), 16), (HeadShape(2, 1, 128), 8)])
def test_pages_are_what_the_cache_says(shape: HeadShape, page: int, dtype: torch.dtype) -> None:
    torch.manual_seed(page)
    starts, counts = [5, 90, 0, 70], [40, 4, 33, 45]
    cache, table, rows = batch(shape, page, [a + b for a, b in zip(starts, counts)], 3.0)
    pages = chosen_of(starts, counts, page, 100)
    got, want = (PageRoom.allocate(shape, page, 60 * page, dtype, "cpu") for _ in range(2))
    for room in (got, want):
        room.k.fill_(7.0)
        room.v.fill_(7.0)
    found = unpacked_pages.unpack_pages(cache, table, rows, pages, got)
    unpacked_pages.unpack_reference(cache, table, rows, pages, want)
    assert found.k is got.k and found.scales is cache.scales
    for mine, other in ((got.k, want.k), (got.v, want.v)):
        assert torch.equal(mine, other)
        assert (mine[len(pages.sequence) :] == 7.0).all()


@pytest.mark.parametrize(("shape", "page"), [(HeadShape(4, 2, 128), 16), (HeadShape(16, 1, 128), 32)])
def test_chunks_attend_to_unpacked_contexts(monkeypatch: pytest.MonkeyPatch, shape: HeadShape, page: int) -> None:
    """Those that are not chosen are left alone; large numbers lie behind the last key of a page, NaN in the rest of the
    room."""
    torch.manual_seed(page)
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 3)
    starts, counts = [37, 500, 3, 130], [96, 20, 40, 33]
    lengths = [a + b for a, b in zip(starts, counts)]
    cache, table, rows = batch(shape, page, lengths, 448.0)
    pages = chosen_of(starts, counts, page, 100)
    room = PageRoom.allocate(shape, page, 40 * page, torch.bfloat16, "cpu")
    room.k.fill_(math.nan)
    room.v.fill_(math.nan)
    taken = np.where(np.array(counts) >= LEAST_QUERIES, counts, 0)
    seqs, firsts, _ = hopper_prefill.split_tiles(np.array(starts), taken, shape)
    qkv = torch.randn(sum(counts), shape.width).bfloat16()
    start, length = (torch.tensor(each, dtype=torch.int32) for each in ([0, *np.cumsum(counts)], lengths))
    out = torch.full((sum(counts), shape.num_heads * 128), math.nan, dtype=torch.bfloat16)
    wide = unpacked_pages.unpack_pages(cache, table, rows, pages, room)
    with interpreting():
        hopper_prefill.hopper_prefill(
            qkv, wide, room.table(), pages.first, start, length, torch.from_numpy(seqs), torch.from_numpy(firsts),
            shape, 0.2, out=out)
    floats = replace(pair_cache(cache.k.bfloat16(), cache.v.bfloat16(), page), scales=cache.scales)
    want = attention_reference(qkv, floats, table[rows.long()], start, length, shape, 0.2)
    for seq, count in enumerate(taken.tolist()):
        mine = slice(int(start[seq]), int(start[seq]) + count)
        assert torch.allclose(out[mine].float(), want[mine].float(), atol=0.02, rtol=0.02)
        assert out[mine.stop : int(start[seq + 1])].isnan().all()
