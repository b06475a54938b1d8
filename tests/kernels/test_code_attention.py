"""Attention over int8 codes: right, and a token's bits the same for every kernel, batch, chunk and block size."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from quire.errors import EngineError
from quire.kernels.kv_spec import KVSpec
from quire.kernels.types import HeadShape, LayerCache
from quire.ops.cpu import CpuOps
from quire.ops.cpu_integer import KERNELS
from quire.ops.reference import TorchOps
from tests.kernels.test_attention import rope_table, same

SHAPES = [HeadShape(9, 3, 64), HeadShape(8, 1, 20), HeadShape(14, 2, 33)]


@pytest.fixture(autouse=True)
def best_kernel(ops):
    yield
    ops.use_integer_kernel(None)


def coded(batch, ops, steps=None, **options):
    cache = ops.allocate_cache(batch.shape.kv.in_codes(), batch.num_blocks, batch.block_size)
    return batch.attend(ops, batch.whole() if steps is None else steps, cache=cache, **options)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Each vector as its codes say: whole multiples of a 127th of the largest number."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def expected(batch, window: int | None, softcap: float | None) -> list[torch.Tensor]:
    shape, found = batch.shape, []
    for qkv in batch.qkv:
        heads = qkv.double().view(len(qkv), -1, shape.head_dim)
        q, k, v = (rounded(part) for part in heads.split([shape.num_heads, *[shape.num_kv_heads] * 2], dim=1))
        of_head = [shape.kv_head(head) for head in range(shape.num_heads)]
        scores = torch.einsum("thd,shd->hts", q, k[:, of_head]) * shape.head_dim**-0.5
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        distance = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))
        hidden = (distance < 0) | (distance >= (window or len(qkv)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(torch.einsum("hts,shd->thd", weights, v[:, of_head]).reshape(len(qkv), -1))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (100, 2.0)])
def test_it_is_attention_of_the_rounded_numbers(variant_ops, paged, shape, window, softcap):
    batch = paged(shape, 16, [1, 64, 130])
    found = coded(batch, variant_ops, window=window, softcap=softcap)
    for one, other in zip(found, expected(batch, window, softcap), strict=True):
        # A code may round to its other neighbour where a quotient in double lies at the border.
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=1e-3)
        assert (one - other.float()).abs().mean() < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_gives_the_bits_of_the_plain_one(variant_ops, paged, shape):
    batch = paged(shape, 16, [3, 150])
    steps = [[(0, 0, 2), (1, 0, 149)], [(0, 2, 3), (1, 149, 150)]]
    variant_ops.use_integer_kernel("plain")
    plain = coded(batch, variant_ops, steps)
    for kernel in KERNELS[1:]:
        if variant_ops.use_integer_kernel(kernel):
            assert same(coded(batch, variant_ops, steps), plain), kernel


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, 5.0)])
def test_chunks_blocks_and_threads_change_no_bit(variant_ops, paged, shape, window, softcap):
    options = {"window": window, "softcap": softcap, "rope": rope_table(200, shape.head_dim // 2 * 2)}
    whole = coded(paged(shape, 16, [200]), variant_ops, **options)
    for size, cuts in ((3, [0, 1, 199, 200]), (16, [0, 50, 51, 52, 117, 200]), (33, [0, 64, 128, 200])):
        steps = [[(0, start, end)] for start, end in pairwise(cuts)]
        for threads in (1, 2):
            variant_ops.set_num_threads(threads)
            assert same(coded(paged(shape, size, [200]), variant_ops, steps, **options), whole)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_alone_or_in_a_mixed_batch_gives_the_same_bits(ops, paged, shape):
    batch = paged(shape, 16, [1, 17, 100, 190])
    alone = coded(batch, ops, [[(row, 0, n)] for row, n in enumerate(batch.lengths)])
    mixed = [
        [(3, 0, 120), (0, 0, 1), (2, 0, 99)],
        [(2, 99, 100), (1, 0, 16), (3, 120, 121)],
        [(1, 16, 17), (3, 121, 190)],
    ]
    assert same(coded(batch, ops, mixed), alone)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_sequences_that_share_blocks_give_the_bits_of_each_alone(ops, paged, shape):
    """Bundles read what sequences share once for all of them."""
    batch = paged(shape, 16, [300] * 6)
    for row in range(6):
        batch.qkv[row][:256] = batch.qkv[0][:256]
        batch.table[row, :16] = batch.table[0, :16]
    steps = [[(0, 0, 256)], *[[(row, 256, 299)] for row in range(6)]]
    together, alone = [[(row, 299, 300) for row in range(6)]], [[(row, 299, 300)] for row in range(6)]
    for one, other in zip(coded(batch, ops, steps + together), coded(batch, ops, steps + alone), strict=True):
        assert torch.equal(one[299], other[299])


@pytest.mark.parametrize("size", [1, 16, 33])
def test_slots_that_nobody_wrote_never_leak(variant_ops, paged, size):
    for shape in SHAPES:
        batch = paged(shape, size, [1, 31, 70])
        clean = coded(batch, variant_ops, window=20)
        cache = variant_ops.allocate_cache(shape.kv.in_codes(), batch.num_blocks, size)
        for part in (cache.k, cache.v):
            part.view(torch.float32).fill_(float("nan"))
        assert same(batch.attend(variant_ops, batch.whole(), window=20, cache=cache), clean)


def test_numbers_that_are_not_finite_stay_in_their_sequence(ops, paged):
    batch = paged(HeadShape(4, 2, 32), 16, [40, 40])
    clean = coded(batch, ops)
    batch.qkv[0][7, 5 * 32] = float("inf")  # of the second kv head's key
    found = coded(batch, ops)
    assert torch.equal(found[1], clean[1]) and torch.equal(found[0][:7], clean[0][:7])
    assert torch.equal(found[0][:, : 2 * 32], clean[0][:, : 2 * 32]) and found[0][7:, 2 * 32 :].isnan().all()


def test_a_token_takes_a_byte_of_each_feature_and_a_scale():
    spec = KVSpec.pair(3, 64, window=5)
    assert spec.in_codes().bytes_per_token() == 2 * 3 * (64 + 4) and spec.bytes_per_token() == 2 * 3 * 64 * 4
    assert spec.in_codes().heads_of_pair() == spec.heads_of_pair() and spec.in_codes().window == 5


def test_whoever_has_no_codes_refuses_them():
    with pytest.raises(EngineError, match="int8 codes"):
        TorchOps().allocate_cache(KVSpec.pair(1, 16).in_codes(), 1, 16)


def test_a_cache_of_floats_is_not_taken_for_codes(paged):
    ops, shape = CpuOps(num_threads=1), HeadShape(2, 1, 16)
    cache = ops.allocate_cache(shape.kv.in_codes(), 4, 16)
    cache.tensors = {name: part.float() for name, part in cache.tensors.items()}
    with pytest.raises(EngineError, match="int32"):
        paged(shape, 16, [5]).attend(ops, [[(0, 0, 5)]], cache=LayerCache(cache.spec, 16, cache.tensors))
