"""Draft trees that grow on the device, level by level: what the kernels exchange, and the same in plain torch.

The rule is that of `worker/tree_drafter.py`: of the candidates of a level the likeliest are expanded, and of all
candidates the likeliest are kept. Here everything has a fixed place, so that captured graphs can grow trees of any
shape: a tree has `width` candidates that follow the text, and `width` more for each node that was expanded; of a level
at most `most` are. So a candidate's number says whose child it is, and nobody has to count. `kernels/triton/growth.py`
has the kernels; these are what they are checked against, and run on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quire.kernels.types import NO_DETOUR
from quire.sampling.sampler import OK

FIELDS: Final = 6
"""int32 words of a tree: row of the table (-1: no tree), position of the last token of its text, most nodes, greatest
depth, whether the token that was drawn counts more than others, and the temperature (float32)."""
ROW, START, NODES, DEPTH, WARM, HEAT = range(FIELDS)
NO_NODE: Final = -2
"""In the place of a parent: there are fewer nodes."""
DRAWN: Final = 0.5
"""Chance, on top of its half, of the token that the model draws with the target's own noise; others have half."""


@dataclass(frozen=True, slots=True)
class Growing:
    """Trees of one step under way, on fixed addresses."""

    width: int
    """Children of a node."""
    most: int
    """Nodes of a level that are expanded."""
    depth: int
    trees: Tensor
    """int32 [N, FIELDS]."""
    level: Tensor
    """int32 [1]: passes since the one that read the text."""
    tokens: Tensor
    """int32 [N, width * (1 + (depth - 1) * most)]: of candidates."""
    chances: Tensor
    """float64, of the whole branch up to each; -1: there is no such candidate."""
    expanded: Tensor
    """int32 [N, depth * most]: candidate that was expanded as this node; -1: none. Node n lies n places behind the
    first after the text."""

    @classmethod
    def allocate(cls, count: int, width: int, most: int, depth: int, trees: Tensor, level: Tensor) -> Growing:
        size, device = width * (1 + (depth - 1) * most), trees.device
        return cls(width, most, depth, trees, level, torch.zeros(count, size, dtype=torch.int32, device=device),
                   torch.full((count, size), -1.0, dtype=torch.float64, device=device),
                   torch.full((count, depth * most), -1, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class NodeRows:
    """The nodes that a pass computes, `most` rows for each tree."""

    ids: Tensor
    rows: Tensor
    """int32: row of the table; -1: padding."""
    places: Tensor
    """int32: where the node lies in its row."""
    after: Tensor
    """int32: one place further than what the node follows."""
    positions: Tensor
    lengths: Tensor
    """int32: keys that it sees, itself included; 0: padding."""
    detours: Tensor
    """int32 [rows, 1 + depth], see `StepContext`."""

    @classmethod
    def allocate(cls, count: int, depth: int, device: torch.device) -> NodeRows:
        def ints(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        detours = torch.zeros(count, 1 + depth, dtype=torch.int32, device=device)
        detours[:, 0] = NO_DETOUR
        return cls(ints(torch.int64), torch.full_like(ints(), -1), ints(), ints(), ints(torch.int64), ints(), detours)


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """Rows of the step that judges: those of a tree's nodes follow that of the token before them."""

    trees: Tensor
    """int32 [N, 4]: row of the table (-1: none), position of the first draft, row of the step of the token before it,
    drafts."""
    rows: Tensor
    positions: Tensor
    parents: Tensor
    detours: Tensor
    tokens: Tensor
    """int32 [rows of the table, positions]."""


def grow(growing: Growing, tokens: Tensor, chances: Tensor, drawn: Tensor, nodes: NodeRows, count: int, first: bool
         ) -> None:
    """What a pass said of each of `count` trees, as candidates; and the nodes of the next pass. `first`: the pass has
    read the text, one row for each tree; else it has computed nodes, `growing.most` for each.

    `tokens` int64 and `chances` float32 [count * rows, width]: the likeliest that may follow each row. `drawn` int32
    [>= count * rows, 2]: what was drawn after it, and the status.
    """
    g, level, rows = growing, int(growing.level[0]), 1 if first else growing.most
    for tree, (row, start, most_nodes, depth, warm, _) in enumerate(g.trees[:count].tolist()):
        here = slice(tree * g.most, (tree + 1) * g.most)
        nodes.rows[here], nodes.lengths[here], nodes.detours[here, 0] = -1, 0, NO_DETOUR
        nodes.ids[here], nodes.places[here], nodes.after[here], nodes.positions[here] = 0, 0, 0, 0
        if row < 0:
            continue
        if first:
            g.chances[tree], g.expanded[tree] = -1.0, -1
        found: list[tuple[float, int]] = []
        for mine in range(rows):
            parent = -1 if first else int(g.expanded[tree, (level - 1) * g.most + mine])
            above = 1.0 if first else float(g.chances[tree, parent]) if parent >= 0 else -1.0
            begin = 0 if first else g.width * (1 + (level - 1) * g.most + mine)
            at = tree * rows + mine
            likely = list(zip(tokens[at].tolist(), chances[at].tolist(), strict=True))
            token, status = drawn[at].tolist()
            if warm:
                own = dict(likely).get(token, 0.0)
                others = [(each, (1.0 - DRAWN) * chance) for each, chance in likely if each != token]
                likely = [(token, DRAWN + (1.0 - DRAWN) * own), *others[: g.width - 1]]
            for j, (each, chance) in enumerate(likely):
                real = above > 0.0 and chance > 0.0 and (not warm or status == OK)
                g.tokens[tree, begin + j], g.chances[tree, begin + j] = each, above * chance if real else -1.0
                if real:
                    found.append((above * chance, begin + j))
        found.sort(key=lambda one: -one[0])
        for e in range(g.most):
            node = level * g.most + e
            if level + 1 >= depth or node >= most_nodes or e >= len(found):
                continue
            candidate = found[e][1]
            g.expanded[tree, node] = candidate
            _put_node(g, nodes, tree, tree * g.most + e, node, candidate, (row, start, level))


def _put_node(g: Growing, nodes: NodeRows, tree: int, at: int, node: int, candidate: int, where: tuple[int, int, int]
              ) -> None:
    row, start, level = where
    above = candidate // g.width - 1
    nodes.ids[at], nodes.rows[at] = g.tokens[tree, candidate].long(), row
    nodes.places[at], nodes.after[at] = start + 1 + node, start + 2 + above
    nodes.positions[at], nodes.lengths[at] = start + 1 + level, start + 2 + level
    nodes.detours[at, 0] = start + 1
    while node >= 0:
        nodes.detours[at, 1 + level] = start + 1 + node
        node, level = int(g.expanded[tree, node]) // g.width - 1, level - 1


def finish(growing: Growing, judged: JudgedRows, count: int, nodes: int) -> None:
    """The best candidates of each of `count` trees, at most `nodes`, as rows of the step that judges them: branch after
    branch, so that the first lies where its positions say. Their tokens go to the table."""
    g = growing
    for tree, (row, position, first, drafts) in enumerate(judged.trees[:count].tolist()):
        if row < 0:
            continue
        chances, expanded = g.chances[tree].tolist(), g.expanded[tree].tolist()
        ranked = sorted((i for i, chance in enumerate(chances) if chance > 0.0), key=lambda i: -chances[i])[:drafts]
        children: dict[int, list[int]] = {}
        for i in ranked:
            children.setdefault(-1 if i < g.width else expanded[i // g.width - 1], []).append(i)
        stack = [(i, -1) for i in reversed(children.get(-1, []))]
        for k in range(drafts):
            at = first + 1 + k
            judged.detours[at, 0] = NO_DETOUR
            judged.rows[at], judged.parents[at], judged.positions[at] = -1, NO_NODE, position + k
            if not stack:
                continue
            i, parent = stack.pop()
            depth = 1 if i < g.width else 2 + (i // g.width - 1) // g.most
            judged.rows[at], judged.parents[at], judged.positions[at] = row, parent, position + depth - 1
            judged.tokens[row, position + k] = g.tokens[tree, i]
            judged.detours[at, 0] = position
            if parent >= 0:
                judged.detours[at, 1:depth] = judged.detours[first + 1 + parent, 1:depth]
            judged.detours[at, depth] = position + k
            stack += [(child, k) for child in reversed(children.get(i, []))]
