"""Attention on Hopper: in deterministic steps chunks go to large tiles, sequences that decode to small ones of the same
kernel; else chunks with a context to the one, prompts without to others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.attention import triton as backend
from quire.attention.triton import DeviceContext, TritonAttention
from quire.kernels.triton import hopper_prefill
from quire.kernels.triton.attention_mixed import attention_reference
from quire.kernels.triton.unpacked_pages import UnpackedPages
from quire.kernels.types import HeadShape, LayerCache, pair_cache
from quire.worker.gpu.batches import MixedBatch
from quire.worker.gpu.contexts import StepContexts
from quire.worker.gpu.staging import Stage
from tests.kernels.triton import cases
from tests.kernels.triton.gluon_interpreter import interpreting

SHAPE, PAGE = HeadShape(4, 1, 128), 16
STARTS, COUNTS = [70, 0, 100, 3], [1, 130, 92, 20]


def staged(attention: TritonAttention, shapes: list[HeadShape]) -> dict[str, np.ndarray]:
    contexts = object.__new__(StepContexts)
    contexts.attention, contexts._plain, contexts._shapes, contexts._block_size = attention, True, shapes, PAGE
    contexts._alike = len(set(shapes)) == 1
    rows = np.arange(len(COUNTS), dtype=np.int32)
    batch = MixedBatch(list(rows), rows, np.array(STARTS, np.int32), np.array(COUNTS, np.int32), 1)
    stage = Stage()
    assert not contexts.add_tiles(stage, batch).dense
    return dict(zip(stage._spans, stage._parts, strict=True))


def covered(tiles: dict[str, np.ndarray], prefix: str, tokens: int) -> list[tuple[int, int]]:
    return [(int(seq), int(first) + token) for seq, first in zip(tiles[f"{prefix}_seq"], tiles[f"{prefix}_first"])
            for token in range(tokens) if first + token < COUNTS[seq]]  # fmt: skip


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> TritonAttention:
    if torch.cuda.is_available():
        pytest.skip("the interpreters stand in for a chip")
    monkeypatch.setattr(hopper_prefill, "available", lambda device: True)
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 3)
    return TritonAttention(torch.device("cpu"), torch.bfloat16, deterministic=True, same_type=True)


def test_every_query_is_in_one_tile_large_or_small(attention: TritonAttention) -> None:
    tiles = staged(attention, [SHAPE, SHAPE])
    full = covered(tiles, "paged_tile", 32)
    rest = covered(tiles, "tile", attention.tokens_per_tile(SHAPE))
    every = sorted((seq, token) for seq, count in enumerate(COUNTS) for token in range(count))
    assert sorted(full + rest) == every
    assert rest == [(0, 0)]


@pytest.mark.parametrize("shapes", [[SHAPE, HeadShape(4, 2, 128)], [HeadShape(4, 1, 64)]], ids=["several", "others"])
def test_heads_that_the_kernel_does_not_serve_are_left_to_the_other(
    attention: TritonAttention, shapes: list[HeadShape]
) -> None:
    tiles = staged(attention, shapes)
    assert not len(tiles["paged_tile_seq"]) and len(covered(tiles, "tile", attention.tokens_per_tile(shapes[0]))) == 243


def a_step(attention: TritonAttention) -> tuple[torch.Tensor, LayerCache, DeviceContext]:
    """qkv, cache and context of all sequences."""
    torch.manual_seed(3)
    tiles = {name: torch.from_numpy(part) for name, part in staged(attention, [SHAPE]).items()}
    lengths = [a + b for a, b in zip(STARTS, COUNTS)]
    qkv, cache, table, start, length = cases.paged_batch("cpu", torch.bfloat16, SHAPE, PAGE, COUNTS, lengths)
    return qkv, cache, DeviceContext(
        start, start, length, (table,), (start,), num_decodes=1, tile_seq=tiles["tile_seq"],
        tile_first=tiles["tile_first"], paged_tiles=(tiles["paged_tile_seq"], tiles["paged_tile_first"]),
    )  # fmt: skip


def test_a_step_of_both_tiles_attends_to_every_key(attention: TritonAttention) -> None:
    qkv, cache, ctx = a_step(attention)
    with interpreting() as runs:
        out = attention(qkv, cache, ctx, 0, SHAPE, 0.2, None, None)
    assert len(runs) == 2
    want = attention_reference(qkv, cache, ctx.block_tables[0], ctx.query_start, ctx.context_len, SHAPE, 0.2)
    assert torch.allclose(out.float(), want.float(), atol=0.02, rtol=0.02)


def test_a_row_has_as_many_keys_at_a_time_in_every_kernel_that_may_compute_it(
    monkeypatch: pytest.MonkeyPatch, attention: TritonAttention
) -> None:
    """Nodes of trees, and pages that the copy engine does not take, are left to the other kernel; so are windows, soft
    caps, sinks and keys in fp8, of which it has every row."""
    seen: list[int] = []
    monkeypatch.setattr(backend, "mixed_attention", lambda *_, sizes, exact, **__: seen.append(sizes.keys * exact))
    qkv, cache, ctx = a_step(attention)
    ctx.paged_tiles = None
    attention(qkv, cache, replace(ctx, detours=torch.zeros(4, 3, dtype=torch.int32)), 0, SHAPE, 0.2, None, None)
    small = pair_cache(*(torch.empty(8, 1, 4, 128, dtype=torch.bfloat16) for _ in range(2)), 4)
    attention(qkv, small, ctx, 0, SHAPE, 0.2, None, None)
    assert seen == [hopper_prefill.PREFILL.keys] * 2 == [hopper_prefill.DECODE.keys] * 2
    seen.clear()
    attention(qkv, cache, ctx, 0, SHAPE, 0.2, 100, None)
    attention(qkv, cache, ctx, 0, SHAPE, 0.2, None, 30.0)
    attention(qkv, cache, ctx, 0, SHAPE, 0.2, None, None, None, torch.zeros(4))
    narrow = pair_cache(*(part.to(torch.float8_e4m3fn) for part in (cache.k, cache.v)), PAGE)
    attention(qkv, narrow, ctx, 0, SHAPE, 0.2, None, None)
    assert seen == [64] * 4


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, attention: TritonAttention) -> TritonAttention:
    return TritonAttention(torch.device("cpu"), torch.bfloat16, same_type=True)


def test_chunks_of_plain_steps_go_to_one_kernel_whole(plain: TritonAttention) -> None:
    """The first sequence decodes; the second has no context and reads its keys from the step's rows."""
    tiles = staged(plain, [SHAPE])
    assert covered(tiles, "row_tile", 16) == [(1, token) for token in reversed_tiles(130, 16)]
    assert sorted(covered(tiles, "paged_tile", 32)) == [(2, token) for token in range(92)] + [(3, t) for t in range(20)]
    assert not len(tiles["tile_seq"])


def reversed_tiles(count: int, tokens: int) -> list[int]:
    """The last tile first."""
    firsts = range(0, count, tokens)
    return [token for first in reversed(firsts) for token in range(first, min(first + tokens, count))]


@pytest.mark.parametrize("same_type", [False, True])
def test_keys_in_another_type_are_left_to_the_tiles(plain: TritonAttention, same_type: bool) -> None:
    other = TritonAttention(torch.device("cpu"), torch.bfloat16, same_type=same_type)
    tiles = staged(other, [SHAPE])
    assert bool(len(tiles["paged_tile_seq"])) == same_type == (not len(tiles["tile_seq"]))


def test_contexts_in_fp8_are_unpacked_where_there_is_room_for_them(plain: TritonAttention) -> None:
    """The chunk of 20 is too short to repay it; deterministic mode unpacks nothing."""
    narrow = TritonAttention(torch.device("cpu"), torch.bfloat16)
    narrow.reserve_room(SHAPE, PAGE, 16 * PAGE)
    tiles = staged(narrow, [SHAPE])
    assert sorted(covered(tiles, "paged_tile", 32)) == [(2, token) for token in range(92)]
    assert sorted(covered(tiles, "tile", narrow.tokens_per_tile(SHAPE))) == [(3, token) for token in range(20)]
    assert tiles["unpacked_seq"].tolist() == [2] * 12
    crowded = TritonAttention(torch.device("cpu"), torch.bfloat16)
    crowded.reserve_room(SHAPE, PAGE, 11 * PAGE)
    assert not len(staged(crowded, [SHAPE])["paged_tile_seq"])
    fixed = TritonAttention(torch.device("cpu"), torch.bfloat16, deterministic=True)
    fixed.reserve_room(SHAPE, PAGE, 16 * PAGE)
    assert not len(staged(fixed, [SHAPE])["paged_tile_seq"])


def test_a_step_over_fp8_attends_to_what_is_unpacked_and_to_what_is_not(plain: TritonAttention) -> None:
    narrow = TritonAttention(torch.device("cpu"), torch.bfloat16)
    narrow.reserve_room(SHAPE, PAGE, 16 * PAGE)
    tiles = {name: torch.from_numpy(part) for name, part in staged(narrow, [SHAPE]).items()}
    qkv, cache, ctx = a_step(narrow)
    stored = [part.to(torch.float8_e4m3fn) for part in (cache.k, cache.v)]
    scales = torch.tensor([[0.5], [2.0]])
    ctx.unpacked = UnpackedPages(tiles["unpacked_seq"], tiles["unpacked_first"])
    with interpreting() as runs:
        out = narrow(qkv, replace(pair_cache(*stored, PAGE), scales=scales), ctx, 0, SHAPE, 0.2, None, None)
    assert len(runs) == 1
    floats = replace(pair_cache(*(part.bfloat16() for part in stored), PAGE), scales=scales)
    want = attention_reference(qkv, floats, ctx.block_tables[0], ctx.query_start, ctx.context_len, SHAPE, 0.2)
    some = slice(int(ctx.query_start[2]), None)  # the first decodes, the second reads its keys from the step's rows
    assert torch.allclose(out[some].float(), want[some].float(), atol=0.03, rtol=0.02)
