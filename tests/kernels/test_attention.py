"""Paged attention: right, and a token's bits the same whatever the batch, chunks, blocks and threads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from quire.errors import EngineError
from quire.kernels.cpu.library import supported_variants
from quire.kernels.types import HeadShape, StepContext
from quire.ops.cpu import CpuOps
from quire.ops.reference import TorchOps

REFERENCE = TorchOps()
SHAPES = [
    HeadShape(1, 1, 8),
    HeadShape(9, 3, 64),
    HeadShape(3, 3, 16),
    HeadShape(8, 1, 20),
    HeadShape(4, 2, 80),
    HeadShape(2, 1, 256),
    HeadShape(14, 2, 33),
]
BLOCK_SIZES = [1, 2, 3, 8, 16, 33, 64]


def rope_table(rows: int, rot: int) -> torch.Tensor:
    angle = torch.arange(rows)[:, None] / 10000 ** (torch.arange(rot // 2) / (rot / 2))
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def close(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def same(got, expected):
    return all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (40, None), (100, 2.0)])
def test_attention_agrees_with_the_reference(variant_ops, paged, shape, window, softcap):
    batch = paged(shape, 16, [1, 64, 65, 130])
    options = {"window": window, "softcap": softcap}
    expected = batch.attend(REFERENCE, batch.whole(), **options)
    close(batch.attend(variant_ops, batch.whole(), **options), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("partial", [False, True])
def test_head_norms_and_rotation_agree_with_the_reference(variant_ops, paged, randn, shape, partial):
    rot = shape.head_dim // 4 * 2 if partial else shape.head_dim // 2 * 2
    options = {
        "rope": rope_table(200, rot),
        "q_norm": randn(shape.head_dim, seed=1),
        "k_norm": randn(shape.head_dim, seed=2),
    }
    batch = paged(shape, 16, [5, 70])
    expected = batch.attend(REFERENCE, batch.whole(), **options)
    close(batch.attend(variant_ops, batch.whole(), **options), expected)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_the_cache_holds_rotated_keys_and_plain_values(ops, paged, shape):
    batch = paged(shape, 4, [9])
    rope = rope_table(16, shape.head_dim)
    caches = []
    for each in (ops, REFERENCE):
        qkv, context = batch.step([(0, 0, 9)])
        cache = each.allocate_cache(shape.kv, batch.num_blocks, 4)
        each.rope_and_cache(qkv, cache, context, 0, shape, rope, None, None, 1e-6)
        caches.append((qkv, cache))
    (qkv, cache), (expected_qkv, expected) = caches
    torch.testing.assert_close(qkv, expected_qkv, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache.k, expected.k, rtol=1e-6, atol=1e-6)
    assert torch.equal(cache.v, expected.v)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_block_size_does_not_change_a_bit(variant_ops, paged, shape, window):
    outputs = []
    for size in BLOCK_SIZES:
        batch = paged(shape, size, [1, 130])
        outputs.append(batch.attend(variant_ops, batch.whole(), window=window))
    assert all(same(output, outputs[0]) for output in outputs[1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, 5.0)])
@pytest.mark.parametrize("size", [3, 16])
def test_chunking_does_not_change_a_bit(variant_ops, paged, shape, window, softcap, size):
    batch = paged(shape, size, [200])
    options = {"window": window, "softcap": softcap, "rope": rope_table(200, shape.head_dim // 2 * 2)}
    whole = batch.attend(variant_ops, batch.whole(), **options)
    by_twelve = [*range(0, 200, 12), 200]
    for cuts in ([0, 1, 199, 200], [0, 64, 128, 200], [0, 50, 51, 52, 117, 200], by_twelve):
        steps = [[(0, start, end)] for start, end in pairwise(cuts)]
        assert same(batch.attend(variant_ops, steps, **options), whole)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_one_by_one_gives_the_bits_of_the_whole_prompt(ops, paged, shape):
    batch = paged(shape, 16, [140])
    assert same(batch.attend(ops, [[(0, t, t + 1)] for t in range(140)]), batch.attend(ops, batch.whole()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 30])
def test_a_sequence_alone_or_in_a_mixed_batch_gives_the_same_bits(variant_ops, paged, shape, window):
    batch = paged(shape, 16, [1, 17, 64, 100, 190])
    alone = batch.attend(variant_ops, [[(row, 0, n)] for row, n in enumerate(batch.lengths)], window=window)
    mixed = [
        [(4, 0, 120), (0, 0, 1), (3, 0, 99)],
        [(3, 99, 100), (1, 0, 16), (4, 120, 121), (2, 0, 64)],
        [(1, 16, 17), (4, 121, 190)],
    ]
    assert same(batch.attend(variant_ops, mixed, window=window), alone)


def shared_prefix_step(shape: HeadShape, block_size: int, lengths: list[int], shared: int) -> tuple:
    """Sequences that decode one token each, the first `shared` tokens of all in the same blocks."""
    common = shared // block_size
    tables, used = [], common
    for length in lengths:
        own = -(-length // block_size) - common
        tables.append([*range(common), *range(used, used + own)])
        used += own
    width = max(map(len, tables))
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    context = StepContext(
        positions=torch.tensor(lengths) - 1,
        query_start=torch.arange(len(lengths) + 1, dtype=torch.int32),
        context_len=torch.tensor(lengths, dtype=torch.int32),
        block_tables=(padded,),
        slots=(torch.tensor([table[(n - 1) // block_size] * block_size + (n - 1) % block_size
                             for table, n in zip(tables, lengths)]),),
    )
    return context, used


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [2, 16, 33])
@pytest.mark.parametrize("threads", [1, 2])
def test_sequences_that_share_blocks_give_the_bits_of_each_alone(randn, shape, block_size, threads):
    lengths = [331, 264, 400, 330, 265, 331, 270, 500, 331]
    context, num_blocks = shared_prefix_step(shape, block_size, lengths, shared=264)
    ops = CpuOps(threads)
    cache = ops.allocate_cache(shape.kv, num_blocks, block_size)
    cache.k.copy_(randn(*cache.k.shape, seed=1))
    cache.v.copy_(randn(*cache.v.shape, seed=2))
    qkv = randn(len(lengths), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, seed=3)
    together = ops.attend(qkv, cache, context, 0, shape, 0.3, None, None)
    for i in range(len(lengths)):
        alone = StepContext(
            context.positions[i : i + 1], torch.tensor([0, 1], dtype=torch.int32), context.context_len[i : i + 1],
            (context.block_tables[0][i : i + 1].contiguous(),), (context.slots[0][i : i + 1],))
        assert torch.equal(together[i : i + 1], ops.attend(qkv[i : i + 1], cache, alone, 0, shape, 0.3, None, None))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_do_not_change_a_bit(paged, shape):
    ops = CpuOps(num_threads=1)
    batch = paged(shape, 16, [1, 17, 300])
    steps = [[(0, 0, 1), (1, 0, 16), (2, 0, 299)], [(1, 16, 17), (2, 299, 300)]]
    alone = batch.attend(ops, steps)
    for threads in (2, 5):
        ops.set_num_threads(threads)
        assert same(batch.attend(ops, steps), alone)


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [None, 20])
def test_slots_that_nobody_wrote_never_leak(variant_ops, paged, size, window):
    for shape in SHAPES:
        batch = paged(shape, size, [1, 31, 70])
        clean = batch.attend(variant_ops, batch.whole(), window=window)
        dirty = batch.attend(variant_ops, batch.whole(), window=window, cache=batch.poisoned(variant_ops))
        assert same(dirty, clean)


@pytest.mark.parametrize("size", [1, 16, 33])
def test_blocks_behind_the_window_are_never_followed(ops, paged, size):
    shape = HeadShape(6, 2, 16)
    batch = paged(shape, size, [200])
    cache = ops.allocate_cache(shape.kv, batch.num_blocks, size)
    first = batch.attend(ops, [[(0, 0, 199)]], window=40, cache=cache)[0][198]
    batch.table[0, : (199 - 40 + 1) // size] = -(2**30)
    out = batch.attend(ops, [[(0, 199, 200)]], window=40, cache=cache)[0][199]
    assert not first.isnan().any()
    whole = paged(shape, size, [200])
    assert torch.equal(out, whole.attend(ops, whole.whole(), window=40)[0][199])


def test_a_sequence_without_queries_is_passed_over(ops, paged):
    batch = paged(HeadShape(2, 1, 16), 16, [10, 20])
    got = batch.attend(ops, [[(0, 0, 10), (1, 0, 0)], [(0, 10, 10), (1, 0, 20)]])
    assert same(got, batch.attend(ops, batch.whole()))


def test_variants_with_an_fma_give_the_same_bits(paged):
    names = [name for name in supported_variants() if name != "x86-64-v2"]
    batch = paged(HeadShape(9, 3, 64), 16, [150])
    options = {"rope": rope_table(200, 64), "softcap": 4.0}
    results = [batch.attend(CpuOps(variant=name), batch.whole(), **options) for name in names]
    assert all(same(result, results[0]) for result in results)


def test_copies_read_every_block_before_writing_any(ops, randn):
    shape = HeadShape(2, 1, 8)
    for source, target in (([0, 1], [2, 3]), ([0, 1, 2], [1, 2, 0]), ([], [])):
        cache, expected = ops.allocate_cache(shape.kv, 5, 4), REFERENCE.allocate_cache(shape.kv, 5, 4)
        for part, other in ((cache.k, expected.k), (cache.v, expected.v)):
            part.copy_(randn(*part.shape))
            other.copy_(part)
        ops.copy_blocks(cache, source, target)
        REFERENCE.copy_blocks(expected, source, target)
        assert torch.equal(cache.k, expected.k)
        assert torch.equal(cache.v, expected.v)


@pytest.mark.parametrize(("source", "target"), [([0], [5]), ([-1], [0]), ([0, 1], [2])])
def test_copies_outside_the_cache_are_refused(ops, source, target):
    cache = ops.allocate_cache(HeadShape(2, 1, 8).kv, 5, 4)
    with pytest.raises(EngineError, match="block copies"):
        ops.copy_blocks(cache, source, target)


def broken_steps():
    def set_slot(context):
        context.slots[0][2] = 10**9

    def set_table(context):
        context.block_tables[0][0, 0] = -1

    def set_length(context):
        context.context_len[0] = 10**6

    def set_start(context):
        context.query_start[1] = 3

    return [
        (set_slot, "slot"),
        (set_length, "context_len"),
        (set_start, "query_start"),
        (set_table, "block table"),
    ]


@pytest.mark.parametrize(("spoil", "message"), broken_steps())
def test_a_context_that_points_outside_the_cache_is_refused(ops, paged, spoil, message):
    shape = HeadShape(2, 1, 16)
    batch = paged(shape, 16, [10])
    qkv, context = batch.step([(0, 0, 10)])
    spoil(context)
    cache = ops.allocate_cache(shape.kv, batch.num_blocks, 16)
    if message != "block table":
        with pytest.raises(EngineError, match=message):
            ops.rope_and_cache(qkv, cache, context, 0, shape, None, None, None, 1e-6)
    with pytest.raises(EngineError, match=message):
        ops.attend(qkv, cache, context, 0, shape, 1.0, None, None)


def test_positions_outside_the_rotary_table_are_refused(ops, paged):
    shape = HeadShape(2, 1, 16)
    batch = paged(shape, 16, [10])
    qkv, context = batch.step([(0, 0, 10)])
    cache = ops.allocate_cache(shape.kv, batch.num_blocks, 16)
    with pytest.raises(EngineError, match="rotary"):
        ops.rope_and_cache(qkv, cache, context, 0, shape, rope_table(9, 16), None, None, 1e-6)


def test_a_rotary_table_wider_than_the_heads_is_refused(ops, paged):
    shape = HeadShape(2, 1, 16)
    batch = paged(shape, 16, [10])
    qkv, context = batch.step([(0, 0, 10)])
    cache = ops.allocate_cache(shape.kv, batch.num_blocks, 16)
    with pytest.raises(EngineError, match="does not fit"):
        ops.rope_and_cache(qkv, cache, context, 0, shape, rope_table(64, 32), None, None, 1e-6)


def test_a_cache_made_for_other_heads_is_refused(ops, paged):
    shape = HeadShape(2, 1, 16)
    batch = paged(shape, 16, [10])
    qkv, context = batch.step([(0, 0, 10)])
    cache = ops.allocate_cache(HeadShape(2, 2, 16).kv, batch.num_blocks, 16)
    with pytest.raises(EngineError, match="made for"):
        ops.attend(qkv, cache, context, 0, shape, 1.0, None, None)


def test_heads_wider_than_the_kernels_are_refused(ops):
    with pytest.raises(EngineError, match="at most 576 wide"):
        ops.allocate_cache(HeadShape(1, 1, 1024).kv, 1, 16)
