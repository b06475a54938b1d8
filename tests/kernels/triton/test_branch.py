"""The branch of a draft tree that was drawn: the walk along it, and the moves of its KV, as in plain torch."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels import step_reference
from quire.kernels.kv_spec import KVSpec
from quire.kernels.triton import branch
from quire.kernels.types import LayerCache, pair_cache
from quire.speculation.tree import path_along

DEPTH, NODES, PAGE, LENGTH = 4, 9, 4, 64


def random_tree(rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens of few kinds and parents, no deeper than DEPTH, siblings that differ."""
    parents, depth, tokens = [], [], []
    for node in range(rng.randrange(1, NODES + 1)):
        parent = rng.choice([-1, *(i for i in range(node) if depth[i] < DEPTH)])
        taken = {tokens[i] for i in range(node) if parents[i] == parent}
        parents.append(parent)
        depth.append(1 if parent < 0 else depth[parent] + 1)
        tokens.append(rng.choice([token for token in range(20) if token not in taken][:3]))
    return tokens, parents


def check_branches(device: str, dtype: torch.dtype) -> None:
    rng, ints = random.Random(1), {"dtype": torch.int32, "device": device}
    trees, parents, ids, drawn, wanted = [], [-2], [0], [[3, 0]], []
    for row in (2, -1, 0, 5, 4):
        tokens, own = random_tree(rng)
        trees.append([row, 20 + row, len(ids), len(tokens)])
        places = [[rng.choice(tokens), int(rng.random() < 0.1)] for _ in range(1 + len(tokens))]
        drawn += places
        ids += [7, *tokens]
        parents += [-2, *own]
        kept = []
        while places[1 + (kept[-1] if kept else -1)][1] == 0:
            said = [places[1 + node][0] for node in [-1, *kept]]
            longer = path_along(tokens, tuple(own), [*said, 0])
            if len(longer) == len(kept):
                break
            kept = longer
        wanted.append([*kept, *[-1] * (DEPTH - len(kept))] if row >= 0 else [9] * DEPTH)
    given = (torch.tensor(trees, **ints), torch.tensor(parents, **ints), torch.tensor(ids, device=device))
    ring, results = torch.tensor([1], **ints), torch.zeros(2, len(ids) + 3, 2, **ints)
    results[1, : len(drawn)] = torch.tensor(drawn, **ints)
    found = []
    for module in (branch, step_reference):
        tokens, path = torch.full((6, LENGTH), -1, **ints), torch.full((5, DEPTH), 9, **ints)
        module.walk_trees(*given, results, ring, tokens, path, 0, NODES)
        found.append((tokens, path))
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][0], found[1][0])
    assert found[0][1].tolist() == wanted and any(each[1] >= 0 for each in wanted)
    check_moves(device, dtype, given[0], found[0][1])


def check_moves(device: str, dtype: torch.dtype, trees: torch.Tensor, path: torch.Tensor) -> None:
    path = path.clone()
    path[0], path[2] = torch.tensor([2, 3, 5, -1]), torch.tensor([0, 2, 4, 7])  # a target that is a source, too
    table = torch.randperm(6 * LENGTH // PAGE, device=device).view(6, -1).to(torch.int32)
    shapes = [(96, 2, PAGE, 12), (96, 1, PAGE, 1100)]
    pair = pair_cache(*(torch.randn(shapes[0], device=device).to(dtype) for _ in range(2)), PAGE)
    one = LayerCache(KVSpec.feature(1100), PAGE, {"feature": torch.randn(shapes[1], device=device).to(dtype)})
    for cache in (pair, one):
        want = {name: part.clone() for name, part in cache.tensors.items()}
        for (row, position, _, _), nodes in zip(trees.tolist(), path.tolist(), strict=True):
            for depth, node in enumerate(nodes):
                if row >= 0 and node >= 0:
                    (a, i), (b, j) = ((int(table[row, p // PAGE]), p % PAGE) for p in (position + node,
                                                                                       position + depth))
                    for part in want.values():
                        part[b, :, j] = part[a, :, i].clone()
        branch.move_branches(cache, table, trees, path)
        assert all(torch.equal(cache.tensors[name], part) for name, part in want.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_are_found_and_moved(dtype: torch.dtype) -> None:
    check_branches("cuda" if torch.cuda.is_available() else "cpu", dtype)
