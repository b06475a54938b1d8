"""Latent attention and grouped GEMMs: right, and the same bits whatever the batch, chunks, blocks and threads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.expert_rows import ExpertRanges
from quire.kernels.slices import Slices
from quire.kernels.types import HeadShape, LatentShape, StepContext
from quire.ops.cpu import CpuOps
from quire.ops.interface import Ops
from quire.ops.reference import TorchOps
from tests.kernels.conftest import Paged
from tests.kernels.test_attention import rope_table, shared_prefix_step

REFERENCE = TorchOps()
SHAPES = [LatentShape(1, 8, 2), LatentShape(6, 24, 8), LatentShape(5, 33, 6), LatentShape(16, 512, 64)]
LENGTHS = [1, 64, 65, 130]


class Latents:
    """Sequences of random queries and latents, in the blocks of a `Paged`, computed in given pieces."""

    def __init__(self, shape: LatentShape, block_size: int, lengths: list[int]) -> None:
        self.shape = shape
        self.pages = Paged(HeadShape(1, 1, 1), block_size, lengths)
        generator = torch.Generator().manual_seed(1)
        self.q = [torch.randn(n, shape.num_heads * shape.width, generator=generator) for n in lengths]
        self.kv = [torch.randn(n, shape.width, generator=generator) for n in lengths]

    def attend(self, ops: Ops, steps: list[list[tuple[int, int, int]]], poison: bool = False) -> list[Tensor]:
        shape, pages = self.shape, self.pages
        cache = ops.allocate_cache(shape.kv, pages.num_blocks, pages.block_size)
        if poison:
            cache.latents.fill_(float("nan"))
        rope = rope_table(256, shape.rope_dim)
        outputs = [torch.full((n, shape.num_heads * shape.rank), float("nan")) for n in pages.lengths]
        for pieces in steps:
            context = pages.step(pieces)[1]
            q, kv = (torch.cat([of[row][start:end] for row, start, end in pieces]) for of in (self.q, self.kv))
            out = ops.latent_attend(q, kv, cache, context, 0, shape, rope, shape.width**-0.5)
            for (row, start, end), part in zip(pieces, out.split([e - s for _, s, e in pieces]), strict=True):
                outputs[row][start:end] = part
        return outputs


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latent_attention_agrees_with_the_reference(variant_ops: CpuOps, shape: LatentShape) -> None:
    batch = Latents(shape, 16, LENGTHS)
    expected = batch.attend(REFERENCE, batch.pages.whole())
    for one, other in zip(batch.attend(variant_ops, batch.pages.whole(), poison=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_chunks_blocks_batch_and_threads_do_not_change_a_bit(shape: LatentShape) -> None:
    one, two = CpuOps(num_threads=1), CpuOps(num_threads=2)
    whole = Latents(shape, 16, [130, 70]).attend(one, [[(0, 0, 130)], [(1, 0, 70)]])
    for size in (1, 3, 16, 64):
        batch = Latents(shape, size, [130, 70])
        for cuts in ([0, 1, 129, 130], [0, 50, 51, 117, 130]):
            steps = [[(0, start, end)] for start, end in pairwise(cuts)]
            assert same(batch.attend(two, [*steps, [(1, 0, 70)]]), whole)
        assert same(batch.attend(two, batch.pages.whole()), whole)
        mixed = [[(1, 0, 69), (0, 0, 100)], *([(0, t, t + 1)] for t in range(100, 129)), [(1, 69, 70), (0, 129, 130)]]
        assert same(batch.attend(two, mixed), whole)


def test_sequences_that_share_blocks_give_the_bits_of_each_alone() -> None:
    """Decoding sequences that begin with the same blocks are folded together, tile by tile."""
    shape, lengths = LatentShape(6, 24, 8), [331, 264, 400, 330, 265, 331, 270]
    context, num_blocks = shared_prefix_step(HeadShape(1, 1, 1), 16, lengths, shared=264)
    generator = torch.Generator().manual_seed(3)
    content = torch.randn(num_blocks, 1, 16, shape.width, generator=generator)
    q = torch.randn(len(lengths), 6 * shape.width, generator=generator)
    kv = torch.randn(len(lengths), shape.width, generator=generator)
    ops, rope, results = CpuOps(num_threads=1), rope_table(512, 8), []
    for rows in [slice(0, len(lengths)), *(slice(i, i + 1) for i in range(len(lengths)))]:
        cache = ops.allocate_cache(shape.kv, num_blocks, 16)
        cache.latents.copy_(content)
        part = StepContext(
            positions=context.positions[rows].contiguous(),
            query_start=torch.arange(len(q[rows]) + 1, dtype=torch.int32),
            context_len=context.context_len[rows].contiguous(),
            block_tables=(context.block_tables[0][rows].contiguous(),),
            slots=(context.slots[0][rows].contiguous(),),
        )
        results.append(ops.latent_attend(q[rows].clone(), kv[rows].clone(), cache, part, 0, shape, rope, 0.2))
    assert torch.equal(results[0], torch.cat(results[1:]))


def test_what_does_not_suit_the_latents_is_refused(ops: CpuOps) -> None:
    shape = LatentShape(2, 8, 4)
    batch = Latents(shape, 4, [5])
    context = batch.pages.step([(0, 0, 5)])[1]
    cache, rope = ops.allocate_cache(shape.kv, 9, 4), rope_table(16, 4)
    q, kv = torch.zeros(5, 24), torch.zeros(5, 12)
    for wrong in ((q[:4], kv), (q, kv[:4])):
        with pytest.raises(EngineError, match="rows"):
            ops.latent_attend(*wrong, cache, context, 0, shape, rope, 1.0)
    with pytest.raises(EngineError, match="rotary table"):
        ops.latent_attend(q, kv, cache, context, 0, shape, rope_table(16, 2), 1.0)
    with pytest.raises(EngineError, match="made for"):
        ops.latent_attend(q, kv, ops.allocate_cache(HeadShape(2, 1, 6).kv, 9, 4), context, 0, shape, rope, 1.0)
    with pytest.raises(EngineError, match="at most 576 wide"):
        ops.allocate_cache(LatentShape(1, 512, 66).kv, 1, 4)


@pytest.mark.parametrize(("n", "k"), [(24, 12), (65, 33), (200, 96)])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_groups_have_the_bits_of_each_groups_gemm(n: int, k: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(n)
    ops, counts = CpuOps(num_threads=threads), [3, 0, 1, 200, 7]
    x = torch.randn(sum(counts), k, generator=generator)
    weights = [torch.randn(n, k, generator=generator) for _ in counts]
    weights[2] = weights[2].to(torch.bfloat16).float()  # kept in another format than its neighbours
    packed = [ops.pack_linear(w, torch.randn(n, generator=generator)) for w in weights]
    alone = [ops.linear(part, w) for part, w in zip(x.split(counts), packed, strict=True)]
    group = ops.group_linears(packed)
    assert torch.equal(ops.grouped_linear(x, torch.tensor(counts), group), torch.cat(alone))
    with pytest.raises(EngineError, match="rows"):
        ops.grouped_linear(x, torch.tensor([1, 1, 1, 1, 1]), group)
    with pytest.raises(EngineError, match="all"):
        ops.group_linears([packed[0], ops.pack_linear(torch.zeros(n, k + 1))])


@pytest.mark.parametrize("experts", [3, 8, 20])
@pytest.mark.parametrize("width", [24, 1030])
def test_the_sum_of_a_tokens_experts_is_that_of_the_reference(experts: int, width: int) -> None:
    """Bit for bit, since both round after the product and add in one order; a rank's ranges give its nodes."""
    generator = torch.Generator().manual_seed(experts)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:3] for _ in range(9)])
    weights = torch.rand(9, 3, generator=generator)
    whole = Slices.of_experts(experts)
    for first, last in ((0, whole.total), (1, whole.total), (0, whole.total - 1)):
        ranges = ExpertRanges(whole.part(first, last))
        pairs = ranges.rows_of(chosen, weights)
        found = torch.randn(len(pairs.rows), width, generator=generator)
        expected = REFERENCE.sum_experts(found, pairs, ranges)
        for threads in (1, 2):
            assert torch.equal(CpuOps(num_threads=threads).sum_experts(found, pairs, ranges), expected)


def test_pairs_lie_by_expert_and_know_their_token() -> None:
    ranges = ExpertRanges(Slices.of_experts(4))
    pairs = ranges.rows_of(torch.tensor([[2, 0], [3, 2], [0, 1]]), torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]))
    assert pairs.counts.tolist() == [2, 1, 2, 1] and pairs.rows.tolist() == [0, 2, 2, 0, 1, 1]
    assert pairs.places.tolist() == [[0, 3], [4, 5], [1, 2]]
    assert pairs.weights.tolist() == torch.tensor([[0.2, 0.1], [0.4, 0.3], [0.5, 0.6]]).tolist()
