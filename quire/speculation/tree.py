"""The shape of a draft tree: each draft has a parent among the drafts before it, or follows the text itself.

A node's KV slot is its number, its position is its depth: two nodes of one depth have the same position and different
slots. Empty parents mean a chain, in which each draft follows the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1
"""The parent of a draft that follows the last token of the text."""
Parents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Limits of a tree."""

    width: int
    """Most children of a node."""
    depth: int
    """Most drafts in a row."""
    nodes: int
    """Most drafts in all."""

    def shallower(self) -> list[TreeShape]:
        """Those with fewer levels, each with its share of the nodes, and this one."""
        shapes = [TreeShape(self.width, depth, self.nodes * depth // self.depth) for depth in range(1, self.depth)]
        return [*(shape for shape in shapes if shape.nodes > shape.depth), self]


def parent_of(parents: Parents, node: int) -> int:
    return parents[node] if parents else node - 1


def depths(parents: Parents) -> list[int]:
    """Depth of each node: 1 for those that follow the text."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def ancestry(parents: Parents) -> list[list[int]]:
    """For each node, the path of nodes from the text to it, itself included."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([node] if parent == ROOT else [*found[parent], node])
    return found


def child_with(drafts: Sequence[int], parents: Parents, node: int, token: int) -> int | None:
    """The child of a node (`ROOT`: of the text) that is `token`."""
    if not parents:
        return node + 1 if node + 1 < len(drafts) and drafts[node + 1] == token else None
    for child in range(node + 1, len(drafts)):
        if parents[child] == node and drafts[child] == token:
            return child
    return None


def path_along(drafts: Sequence[int], parents: Parents, tokens: Sequence[int]) -> list[int]:
    """The nodes of a tree that a step accepted, given its output `tokens`, of which the last is the target's own."""
    path: list[int] = []
    for token in tokens[:-1]:
        child = child_with(drafts, parents, path[-1] if path else ROOT, token)
        if child is None:
            break
        path.append(child)
    return path
