"""Grows a draft tree for one sequence by adding the likeliest candidate node until the tree is full.

A node's probability is its parent's times that of being the next token there, which is learned by evidence and by rank
among the alternatives. Probabilities fall along a branch, so the likeliest nodes always form a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from quire.speculation.proposer import Proposer
from quire.speculation.tree import ROOT, Parents, TreeShape

Chance = Callable[[int, int], float]
"""(evidence, rank) of an alternative -> probability that it is the next token."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Nodes, likeliest first, so every prefix of the lists is a tree; `chances` are those of whole branches."""

    tokens: tuple[int, ...] = ()
    parents: Parents = ()
    chances: tuple[float, ...] = ()


def grow(proposer: Proposer, chance: Chance, shape: TreeShape, least: float) -> Grown:
    """A tree of drafts that are each accepted with probability `least` or more."""
    cursor = proposer.cursor()
    if cursor is None:
        return Grown()
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    waiting: list[tuple[float, int, int, int, int, object]] = []
    """Heap of candidates (-chance, order, token, parent, depth, parent's cursor): likeliest first, then oldest."""

    def put_children(cursor: object, parent: int, depth: int, all_of_them: float) -> None:
        for rank, (token, evidence) in enumerate(proposer.followers(cursor, shape.width)):
            mine = all_of_them * chance(evidence, rank)
            if mine >= least:
                heapq.heappush(waiting, (-mine, len(tokens) * shape.width + rank, token, parent, depth, cursor))

    put_children(cursor, ROOT, 1, 1.0)
    while waiting and len(tokens) < shape.nodes:
        cost, _, token, parent, depth, before = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        chances.append(-cost)
        if depth < shape.depth and len(tokens) < shape.nodes:
            put_children(proposer.follow(before, token), len(tokens) - 1, depth + 1, -cost)
    return Grown(tuple(tokens), tuple(parents), tuple(chances))


def in_order(tokens: tuple[int, ...], parents: Parents) -> tuple[tuple[int, ...], Parents]:
    """The same tree in depth-first order, so that slots of the first branch equal its positions and its KV need not
    move when it is accepted. A tree of one branch gets no parents."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    stack = list(reversed(children.get(ROOT, [])))
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children.get(node, [])))
    place = {node: i for i, node in enumerate(order)}
    moved = tuple(ROOT if parents[node] == ROOT else place[parents[node]] for node in order)
    chain = all(parent == node - 1 for node, parent in enumerate(moved))
    return tuple(tokens[node] for node in order), () if chain else moved
