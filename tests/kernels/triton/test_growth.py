"""Draft trees that grow on the device: the kernels against plain torch, and both against the trees of a CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels import growth
from quire.kernels.types import NO_DETOUR
from quire.sampling.params import SamplingParams
from quire.sampling.sampler import OK
from quire.scheduler.plan import PlanEntry
from quire.speculation.growing import in_order
from quire.speculation.tree import ancestry, depths
from quire.worker.tree_drafter import _Growing

LENGTH = 96
SHAPES = [(3, 2, 4), (4, 1, 3), (2, 2, 2), (5, 4, 3), (3, 3, 1), (16, 2, 3)]
"""Width, nodes of a level that are expanded, depth."""


def likeliest(rng: random.Random, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and falling chances of each row; some are equal, some 0."""
    tokens = torch.tensor([rng.sample(range(40), width) for _ in range(rows)])
    chances = [sorted((rng.choice([0.0, 0.125, 0.25, rng.random()]) for _ in range(width)), reverse=True)
               for _ in range(rows)]
    return tokens, torch.tensor(chances, dtype=torch.float32)


def children(tokens: list[int], chances: list[float], drawn: list[int], warm: bool) -> list[tuple[int, float]]:
    """As `TreeDrafter._children` has them."""
    likely = list(zip(tokens, chances, strict=True))
    if warm and drawn[1] != OK:
        return []
    if warm:
        own = dict(likely).get(drawn[0], 0.0)
        others = [(token, 0.5 * chance) for token, chance in likely if token != drawn[0]]
        likely = [(drawn[0], 0.5 + 0.5 * own), *others[: len(tokens) - 1]]
    return [(token, chance) for token, chance in likely if chance > 0.0]


class Trees:
    """The same growth by a module's kernels."""

    def __init__(self, module: Any, device: str, shape: tuple[int, int, int], fields: list[list[int]]) -> None:
        self.module, (width, most, depth) = module, shape
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.growing = growth.Growing.allocate(len(fields), width, most, depth, torch.tensor(fields, **ints),
                                               torch.zeros(1, **ints))
        self.growing.chances.fill_(0.9)  # of other trees, before
        self.growing.expanded.fill_(0)
        self.nodes = growth.NodeRows.allocate(len(fields) * most, depth, torch.device(device))

    def grow(self, tokens: torch.Tensor, chances: torch.Tensor, drawn: torch.Tensor, first: bool) -> None:
        device = self.growing.trees.device
        self.module.grow(self.growing, tokens.to(device), chances.to(device), drawn.to(device), self.nodes,
                         len(self.growing.trees), first)

    def finish(self, counts: list[int], nodes: int) -> growth.JudgedRows:
        device, fields = self.growing.trees.device, self.growing.trees.tolist()
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        trees, first = [], 1
        for (row, start, *_), count in zip(fields, counts, strict=True):
            trees.append([row, start + 1, first, count])
            first += 1 + count
        judged = growth.JudgedRows(
            torch.tensor(trees, **ints), torch.full((first,), 7, **ints), torch.full((first,), 5, **ints),
            torch.full((first,), 6, **ints), torch.full((first, 1 + self.growing.depth), 3, **ints),
            torch.full((8, LENGTH), 50, **ints))
        self.module.finish(self.growing, judged, len(fields), nodes)
        return judged


def check_nodes(tree: Trees, owners: list[tuple[_Growing, int] | None], at: int) -> None:
    """What the next pass is told of its nodes."""
    nodes = tree.nodes
    for i, owner in enumerate(owners):
        if owner is None:
            assert int(nodes.rows[at + i]) == -1 and int(nodes.lengths[at + i]) == 0
            assert int(nodes.detours[at + i, 0]) == NO_DETOUR
            continue
        each, candidate = owner
        line, first = each.line(candidate), each.entry.start + 1
        assert int(nodes.ids[at + i]) == line[-1].token and int(nodes.rows[at + i]) == each.entry.row
        assert int(nodes.positions[at + i]) == first + len(line) - 1 == int(nodes.lengths[at + i]) - 1
        assert int(nodes.places[at + i]) == first + line[-1].number
        assert int(nodes.after[at + i]) == first + (line[-2].number + 1 if len(line) > 1 else 0)
        assert nodes.detours[at + i, : 1 + len(line)].tolist() == [first, *(first + one.number for one in line)]


def check_growth(device: str, shape: tuple[int, int, int], seed: int) -> None:
    """Trees of all sizes, one of them none, along the CPU's own class."""
    from quire.kernels.triton import growth as kernels

    rng = random.Random(seed)
    width, most, depth = shape
    fields, entries = [], []
    for row in (3, -1, 0, 6, 2):
        own = rng.randrange(1, depth + 1)
        nodes = rng.randrange(max(own, 2), most * depth + 3)
        fields.append([row, 11 + row, nodes, own, rng.randrange(2), 0])
        entries.append(PlanEntry(row, 11 + row, 1 + nodes, True, device_drafts=nodes, draft_depth=own))
    plain: list[Any] = [_Growing(entry, SamplingParams()) for entry in entries]  # type: ignore[arg-type]
    both = [Trees(module, device, shape, fields) for module in (growth, kernels)]
    owners: list[list[int | None]] = [[None] for _ in entries]
    for level in range(depth):
        rows = 1 if level == 0 else most
        tokens, chances = likeliest(rng, len(entries) * rows, width)
        drawn = torch.tensor([[rng.randrange(40) if rng.random() < 0.5 else int(one[0]), int(rng.random() < 0.1)]
                              for one in tokens], dtype=torch.int32)
        for each in both:
            each.growing.level.fill_(level)
            each.grow(tokens, chances, drawn, level == 0)
        for t, each in enumerate(plain):
            for e in range(rows):
                at = t * rows + e
                found = children(tokens[at].tolist(), chances[at].tolist(), drawn[at].tolist(), bool(fields[t][4]))
                if level == 0:
                    each.add(-1, found)
                elif owners[t][e] is not None:
                    each.add(owners[t][e], found)
            each.num_expanded = min(level * most, each.entry.device_drafts)  # nodes have fixed places
            chosen = each.best(level + 1, most) if level + 1 < each.entry.draft_depth and fields[t][0] >= 0 else []
            for e, candidate in enumerate(chosen):
                each.candidates[candidate].number = level * most + e
            owners[t] = [*chosen, *[None] * (most - len(chosen))]
            for tree in both:
                check_nodes(tree, [None if one is None else (each, one) for one in owners[t]], t * most)
    assert torch.equal(both[0].growing.chances[[0, 2, 3, 4]], both[1].growing.chances[[0, 2, 3, 4]])
    check_kept([tree.finish([entry.device_drafts for entry in entries], most * depth + 3) for tree in both], plain)


def check_kept(both: list[growth.JudgedRows], plain: list[_Growing]) -> None:
    for name in ("rows", "positions", "parents", "tokens"):
        assert torch.equal(getattr(both[0], name), getattr(both[1], name)), name
    kept = 0
    for judged in both:
        for t, each in enumerate(plain):
            row, position, first, count = judged.trees[t].tolist()
            here = slice(first + 1, first + 1 + count)
            if row < 0:
                assert judged.rows[here].tolist() == [7] * count
                continue
            want = each.filled()
            parents = want.parents or tuple(range(-1, len(want.drafts) - 1))
            real = len(parents)
            kept += real
            missing = count - real
            assert judged.parents[here].tolist() == [*parents, *[growth.NO_NODE] * missing]
            assert judged.rows[here].tolist() == [*[row] * real, *[-1] * missing]
            assert judged.tokens[row, position : position + real].tolist() == list(want.drafts)
            ahead = [position + depth - 1 for depth in depths(parents)]
            assert judged.positions[here].tolist() == [*ahead, *range(position + real, position + count)]
            assert in_order(want.drafts, parents)[0] == want.drafts
            for node, path in enumerate(ancestry(parents)):
                line = judged.detours[first + 1 + node, : 1 + len(path)].tolist()
                assert line == [position, *(position + one for one in path)]
            assert judged.detours[first + 1 + real : first + 1 + count, 0].tolist() == [NO_DETOUR] * missing
            assert int(judged.rows[first]) == 7 and int(judged.positions[first]) == 5
    assert kept > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_grow_as_on_a_cpu(shape: tuple[int, int, int]) -> None:
    for seed in range(3):
        check_growth("cuda" if torch.cuda.is_available() else "cpu", shape, seed)
