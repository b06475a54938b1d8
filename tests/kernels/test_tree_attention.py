"""A node of a draft tree attends to its ancestors where they lie, with the bits of a text that goes straight to it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from quire.errors import EngineError
from quire.kernels.kv_spec import KVSpec
from quire.kernels.types import NO_DETOUR, HeadShape, LatentShape, LayerCache, StepContext
from quire.ops.cpu import CpuOps
from quire.ops.reference import TorchOps

PARENTS = (-1, 0, 1, -1, 3, 0, 5, 2, 7, 8)
"""Two children of the root; the deepest branch is not the first one."""


def paths(parents: tuple[int, ...]) -> list[list[int]]:
    """Of the root, then of each node: the nodes from the root to it."""
    found: list[list[int]] = [[]]
    for node, parent in enumerate(parents):
        found.append([*found[parent + 1], node])
    return found


def tree_step(length: int, block_size: int, parents: tuple[int, ...], plain: int = 0) -> tuple[StepContext, int]:
    """The last of `length` tokens and the nodes after it; then `plain` other sequences that decode one token."""
    own = -(-(length + len(parents)) // block_size)
    table = random.Random(length).sample(range(own), own)
    trail = paths(parents)
    positions = [length - 1 + len(path) for path in trail]
    places = list(range(length - 1, length + len(parents)))
    depth = max(map(len, trail))
    detours = [[length, *(length + node for node in path), *[-1] * (depth - len(path))] for path in trail]
    detours += [[NO_DETOUR, *[-1] * depth]] * plain
    rows = [table] * len(trail) + [list(range(own * (i + 1), own * (i + 2))) for i in range(plain)]
    places += [7 + i for i in range(plain)]
    positions += places[len(trail):]
    return StepContext(
        positions=torch.tensor(positions),
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
        context_len=torch.tensor(positions, dtype=torch.int32) + 1,
        block_tables=(torch.tensor(rows, dtype=torch.int32),),
        slots=(torch.tensor([row[p // block_size] * block_size + p % block_size
                             for row, p in zip(rows, places, strict=True)]),),
        detours=torch.tensor(detours, dtype=torch.int32),
    ), own * (1 + plain)


def alone(context: StepContext, index: int) -> StepContext:
    """The step of one of its sequences, without detours."""
    return StepContext(context.positions[index : index + 1], torch.tensor([0, 1], dtype=torch.int32),
                       context.context_len[index : index + 1], (context.block_tables[0][index : index + 1],),
                       (context.slots[0][index : index + 1],))


def straightened(ops: CpuOps, cache: LayerCache, context: StepContext, path: list[int], length: int) -> LayerCache:
    """A cache in which the nodes of a path lie where their positions say."""
    other = LayerCache(cache.spec, cache.block_size, {name: part.clone() for name, part in cache.tensors.items()},
                       tokens_last=cache.tokens_last)
    size, row = cache.block_size, context.block_tables[0][0]
    places = torch.arange(length, length + len(path))
    target = row[places // size].long() * size + places % size
    source = context.slots[0][[1 + node for node in path]]
    ops.copy_slots(other, source, target)
    return other


def filled(ops: CpuOps, kv: KVSpec, blocks: int, size: int) -> LayerCache:
    cache = ops.allocate_cache(kv, blocks, size)
    generator = torch.Generator().manual_seed(blocks)
    for part in cache.tensors.values():
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


@pytest.mark.parametrize("shape", [HeadShape(9, 3, 64), HeadShape(14, 2, 33)], ids=str)
@pytest.mark.parametrize("size", [1, 16, 33])
@pytest.mark.parametrize(("length", "window", "softcap"), [
    (1, None, None), (60, None, None), (128, 20, 3.0), (190, None, None)])
def test_every_node_has_the_bits_of_plain_decoding(variant_ops, randn, shape, size, length, window, softcap):
    context, blocks = tree_step(length, size, PARENTS, plain=2)
    cache = filled(variant_ops, shape.kv, blocks, size)
    qkv = randn(len(context.positions), shape.width, seed=3)
    found = variant_ops.attend(qkv, cache, context, 0, shape, 0.3, window, softcap)
    expected = TorchOps().attend(qkv, cache, context, 0, shape, 0.3, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)
    trail = [*paths(PARENTS), [], []]
    for i, path in enumerate(trail):
        plain = straightened(variant_ops, cache, context, path, length)
        one = variant_ops.attend(qkv[i : i + 1], plain, alone(context, i), 0, shape, 0.3, window, softcap)
        assert torch.equal(found[i : i + 1], one)


@pytest.mark.parametrize("threads", [1, 3])
def test_two_trees_in_a_batch_do_not_disturb_each_other(randn, threads):
    ops, shape, size = CpuOps(threads), HeadShape(6, 3, 64), 16
    steps = [tree_step(length, size, PARENTS) for length in (130, 70)]
    (a, blocks), (b, more) = steps
    width = max(a.block_tables[0].shape[1], b.block_tables[0].shape[1])
    tables = [torch.nn.functional.pad(step.block_tables[0], (0, width - step.block_tables[0].shape[1]))
              for step, _ in steps]
    tables[1] = tables[1] + blocks
    both = StepContext(
        torch.cat([a.positions, b.positions]), torch.arange(23, dtype=torch.int32),
        torch.cat([a.context_len, b.context_len]), (torch.cat(tables).to(torch.int32),),
        (torch.cat([a.slots[0], b.slots[0] + blocks * size]),), detours=torch.cat([a.detours, b.detours]))
    cache = filled(ops, shape.kv, blocks + more, size)
    qkv = randn(22, shape.width, seed=5)
    together = ops.attend(qkv, cache, both, 0, shape, 0.3, None, None)
    first = ops.attend(qkv[:11], cache, a, 0, shape, 0.3, None, None)
    assert torch.equal(together[:11], first)
    torch.testing.assert_close(together, TorchOps().attend(qkv, cache, both, 0, shape, 0.3, None, None),
                               rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("length", [5, 130])
def test_latents_and_codes_take_detours_too(ops, randn, length):
    size, trail = 16, paths(PARENTS)
    context, blocks = tree_step(length, size, PARENTS)
    latent = LatentShape(4, 32, 16)
    rope = torch.cat([torch.ones(300, 8), torch.zeros(300, 8)], 1)  # turns nothing
    shape, count = HeadShape(4, 2, 64), len(trail)
    q, kv = randn(count, 4 * 48, seed=1), randn(count, 48, seed=2)
    cache = filled(ops, latent.kv, blocks, size)
    found = ops.latent_attend(q.clone(), kv.clone(), cache, context, 0, latent, rope, 0.2)
    expected = TorchOps().latent_attend(q.clone(), kv.clone(), cache, context, 0, latent, rope, 0.2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)
    codes = ops.allocate_cache(shape.kv.in_codes(), blocks, size)
    qkv, fill = randn(count, shape.width, seed=4), randn(length, shape.width, seed=6)
    row = context.block_tables[0][:1]
    before = torch.arange(length)
    ops.rope_and_cache(fill, codes, StepContext(before, torch.tensor([0, length], dtype=torch.int32), torch.tensor(
        [length], dtype=torch.int32), (row,), (row[0, before // size].long() * size + before % size,)),
        0, shape, None, None, None, 0.0)
    ops.rope_and_cache(qkv, codes, context, 0, shape, None, None, None, 0.0)
    coded = ops.attend(qkv, codes, context, 0, shape, 0.2, None, None)
    for i, path in enumerate(trail):
        plain = straightened(ops, codes, context, path, length)
        one = ops.attend(qkv[i : i + 1], plain, alone(context, i), 0, shape, 0.2, None, None)
        assert torch.equal(coded[i : i + 1], one)


def test_a_detour_that_leads_nowhere_is_refused(ops, randn):
    shape = HeadShape(2, 1, 16)
    for row, column, value in itertools.product([3], [1, 2], [-1, 999]):
        context, blocks = tree_step(20, 16, PARENTS)
        cache = filled(ops, shape.kv, blocks, 16)
        context.detours[row, column] = value
        with pytest.raises(EngineError, match="detour"):
            ops.attend(randn(len(context.positions), shape.width), cache, context, 0, shape, 0.3, None, None)
