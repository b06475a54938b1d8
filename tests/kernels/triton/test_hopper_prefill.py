"""Prefill attention by tiles that the copy engine loads, run by our interpreter, which also
checks how they wait and refill."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.triton import hopper_prefill
from quire.kernels.triton.attention_mixed import attention_reference
from quire.kernels.triton.rope_cache import rope_and_cache_reference
from quire.kernels.types import HeadShape, HeadTurn, pair_cache
from tests.kernels.triton import cases
from tests.kernels.triton.gluon_interpreter import interpreting

ORDERS = (range, lambda n: reversed(range(n)), lambda n: random.Random(n).sample(range(n), n))
SEEDS = (None, 1, 2)
EARLIER = ("tables", "rows", "tile_seq", "tile_first", "query_start", "context_len")
"""What the kernel before this one does not write."""
SIZES = (hopper_prefill.PREFILL, hopper_prefill.DECODE, hopper_prefill.PrefillShape(64, 2),
         hopper_prefill.PrefillShape(128, 1, groups=1, programs=2))  # fmt: skip
DECODES = [hopper_prefill.DECODE, hopper_prefill.DECODE_MANY, hopper_prefill.DECODE_FEW]


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


@pytest.mark.parametrize(("stages", "parts"), [(1, 1), (3, 1), (1, 2), (4, 2)])
def test_steps_that_decode_leave_out_padding_and_wait_for_the_kernel_before(
    monkeypatch: pytest.MonkeyPatch, stages: int, parts: int
) -> None:
    """A sequence without keys gets zeros, whatever its row; a tile of no sequence writes nothing."""
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 3)
    shape, lengths = HeadShape(8, 2, 128), [130, 0, 128, 5, 400]
    sizes = hopper_prefill.PrefillShape(128, stages, groups=1, parts=parts)
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


def _raw(heads: HeadShape, lengths: list[int], page: int, normed: bool, table: torch.Tensor) -> hopper_prefill.RawHeads:
    """Norms, rotations and slots of the newest tokens of these sequences; one without keys has no slot."""
    angles = torch.rand(max(lengths), 64) * 6
    gains = [torch.rand(128) + 0.5 for _ in range(2)] if normed else [None, None]
    newest = torch.tensor(lengths) - 1
    blocks = table.long().gather(1, newest.clamp(min=0)[:, None] // page)[:, 0]
    slots = torch.where(newest < 0, -1, blocks * page + newest % page)
    turn = HeadTurn(torch.cat((angles.cos(), angles.sin()), 1), *gains, eps=1e-6)
    assert hopper_prefill.turns(heads, turn)
    return hopper_prefill.RawHeads(turn, newest.clamp(min=0), slots)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "page"), [((8, 2, 128), 16), ((16, 2, 128), 64), ((2, 2, 128), 8)])
@pytest.mark.parametrize("sizes", DECODES, ids=str)
def test_decode_steps_may_come_as_their_projection_left_them(
    monkeypatch: pytest.MonkeyPatch, sizes: hopper_prefill.PrefillShape, heads: tuple[int, int, int], page: int,
    normed: bool,
) -> None:  # fmt: skip
    """Keys and values of earlier steps are read before the kernel before has ended; of the step's own the cache knows
    nothing yet, and what lies behind them is poison. Rows of the step stay as they are."""
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 3)
    shape, lengths = HeadShape(*heads), [130, 0, 128, 5, 400, 1, 129, 256]
    count = len(lengths)
    qkv, cache, table, start, length = cases.paged_batch(
        "cpu", torch.bfloat16, shape, page, [1] * count, lengths)
    raw = _raw(shape, lengths, page, normed, table)
    for slot, keys in zip(raw.slots.tolist(), lengths):
        if keys:
            for part in (cache.k, cache.v):
                part[slot // page, :, slot % page :] = math.nan
    turned, kept = qkv.clone(), pair_cache(cache.k.clone(), cache.v.clone(), page)
    turn = raw.turn
    rope_and_cache_reference(
        turned, kept, raw.slots, raw.positions, shape, turn.rope, turn.q_norm, turn.k_norm, turn.eps)
    want = attention_reference(turned, kept, table, start, length, shape, 0.2)
    rows = torch.tensor([0, -(1 << 20), *range(2, count)], dtype=torch.int32)
    tiles = torch.tensor([0, 1, 2, -1, *range(4, count)], dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    known = (*EARLIER, "k_cache", "v_cache", "slots", "positions", "rope", "q_norm", "k_norm")
    others = [at for at in range(count) if at not in (1, 3)]
    for order, seed in zip(ORDERS, SEEDS):
        out, mine = torch.full_like(want, math.nan), pair_cache(cache.k.clone(), cache.v.clone(), page)
        given = qkv.clone()
        with interpreting(order, seed, constant=known):
            hopper_prefill.hopper_prefill(
                given, mine, table, rows, start, length, *tiles, shape, 0.2, out=out, sizes=sizes, pdl=True, raw=raw)
        assert torch.equal(given, qkv) and (out[1] == 0).all() and out[3].isnan().all()
        assert torch.allclose(out[others].float(), want[others].float(), atol=0.02, rtol=0.02)
        slot = raw.slots[3]
        kept.k[slot // page, :, slot % page] = kept.v[slot // page, :, slot % page] = math.nan
        for got, expected in ((mine.k, kept.k), (mine.v, kept.v)):
            assert torch.allclose(got.float(), expected.float(), atol=0.02, rtol=0.01, equal_nan=True)


def test_heads_that_a_decode_step_does_not_turn_itself() -> None:
    turn = HeadTurn(torch.empty(4, 128), torch.empty(128), torch.empty(128), 1e-6)
    assert hopper_prefill.turns(HeadShape(64, 8, 128), turn) and not hopper_prefill.turns(HeadShape(64, 4, 128), turn)
    for other in (HeadTurn(None), HeadTurn(torch.empty(4, 64)), replace(turn, k_norm=None),
                  replace(turn, sinks=torch.empty(64))):  # fmt: skip
        assert not hopper_prefill.turns(HeadShape(64, 8, 128), other)


def test_many_have_two_programs_to_a_multiprocessor_and_few_two_to_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 132)
    shape, device = HeadShape(32, 8, 128), torch.device("cuda")
    assert hopper_prefill.decode_sizes(8, shape, device) == hopper_prefill.DECODE_FEW
    assert hopper_prefill.decode_sizes(9, shape, device) == hopper_prefill.DECODE
    assert hopper_prefill.decode_sizes(16, shape, device) == hopper_prefill.DECODE
    assert hopper_prefill.decode_sizes(17, shape, device) == hopper_prefill.DECODE_MANY


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
