"""What attention is told of draft trees: which nodes attend, and where the keys of their ancestors lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.types import NO_DETOUR, StepContext
from quire.scheduler.plan import PlanEntry
from quire.speculation.tree import ancestry, depths
from quire.worker.request_table import Ints, RequestTable


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a tree that a draft model is to compute. Its token is in the table, at its place."""

    row: int
    first: int
    """The place of node 0, and the position of those that follow the text."""
    path: tuple[int, ...]
    """The nodes from the text to it, itself included."""


def node_inputs(table: RequestTable, nodes: Sequence[Node], groups: Sequence[int] | None = None
                ) -> tuple[Tensor, StepContext]:
    """Token ids and step context of nodes, each of which sees the text and its ancestors."""
    rows = np.array([node.row for node in nodes], np.int64)
    places = np.array([node.first + node.path[-1] for node in nodes], np.int64)
    lengths = np.array([node.first + len(node.path) for node in nodes], np.int32)
    deepest = max(len(node.path) for node in nodes)
    detours = np.zeros((len(nodes), 1 + deepest), np.int32)
    for i, node in enumerate(nodes):
        detours[i, : 1 + len(node.path)] = [node.first, *(node.first + each for each in node.path)]
    width = -(-(int(places.max()) + 1) // table.block_size)
    chosen = range(len(table.tables)) if groups is None else groups
    return torch.from_numpy(table.tokens[rows, places].astype(np.int64)), StepContext(
        positions=torch.from_numpy(lengths.astype(np.int64) - 1),
        query_start=torch.arange(len(nodes) + 1, dtype=torch.int32),
        context_len=torch.from_numpy(lengths),
        block_tables=tuple(torch.from_numpy(table.tables[group][rows, :width]) for group in chosen),
        slots=tuple(table.slots(group, rows, places) for group in chosen),
        detours=torch.from_numpy(detours),
    )


def sequences(entries: Sequence[PlanEntry]) -> list[tuple[int, int, int]]:
    """(row, first place, tokens) of what attends as one sequence: a tree's nodes, and the token before them, one
    each."""
    found = []
    for entry in entries:
        if entry.parents:
            found += [(entry.row, entry.start + i, 1) for i in range(entry.num_tokens)]
        else:
            found.append((entry.row, entry.start, entry.num_tokens))
    return found


def tree_detours(entries: Sequence[PlanEntry]) -> tuple[Ints, Ints]:
    """Of each of `sequences`: the keys that its last token sees, and where those of a node's ancestors lie."""
    deepest = max(max(depths(entry.parents)) for entry in entries if entry.parents)
    lengths: list[int] = []
    rows: list[list[int]] = []
    for entry in entries:
        if not entry.parents:
            lengths.append(entry.start + entry.num_tokens)
            rows.append([NO_DETOUR, *[0] * deepest])
            continue
        first = entry.start + 1
        for path in ([], *ancestry(entry.parents)):
            lengths.append(first + len(path))
            rows.append([first, *(first + node for node in path), *[0] * (deepest - len(path))])
    return np.array(lengths, np.int32), np.array(rows, np.int32)
