"""How a row-parallel GEMM cuts its sum over k into slices, and the one binary tree in which the slices are added.

A rank of a tensor-parallel group owns a run of whole slices. Each slice is summed from zero, in the order of k, and the
slices are added in a tree that depends on their number alone. One rank that owns them all and eight ranks that own one
each make the same additions, so every number of ranks gives the same bits. Bias and residual come after the tree.

The tree over n slices adds neighbours first and carries an odd one up: its left half holds the largest power of two
smaller than n. A node is written as the range (first, last) of the slices under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from quire.errors import EngineError

MLP_RANGES = 8
"""So that up to eight ranks share the MLP."""
MANY_HEADS = 16
"""Query heads from which on they are summed in ranges too: a slice of one head is so short that putting its sum away
takes a GPU as long as multiplying (an H200, 8,192 rows by 4,096 x 4,096: 32 slices 1.5 times cuBLAS's time)."""
UNIT = 32
"""Borders of an MLP's ranges are multiples of this: the group of the scaled weight formats."""
Node = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slices:
    """The run [first, last) of the `total` slices of one sum over `sum_width` columns.

    Slices are made of whole units of `unit` columns, dealt out as evenly as possible; the sum's last unit may be short.
    """

    sum_width: int
    unit: int
    total: int
    first: int
    last: int

    def __post_init__(self) -> None:
        units = -(-self.sum_width // self.unit)
        if not (1 <= self.total <= units and 0 <= self.first < self.last <= self.total):
            raise ValueError(f"no run of slices: {self}")

    @classmethod
    def each(cls, count: int, width: int) -> Self:
        """So many slices of `width` columns."""
        return cls(count * width, width, count, 0, count)

    @classmethod
    def of_heads(cls, num_heads: int, head_dim: int) -> Self:
        """Of the attention's output projection: a query head each, or eight ranges of many heads."""
        count = num_heads if num_heads < MANY_HEADS else MLP_RANGES
        return cls(num_heads * head_dim, head_dim, count, 0, count)

    @classmethod
    def of_width(cls, width: int) -> Self:
        """Eight ranges of an MLP's width: its second GEMM.

        Borders are multiples of 32 except the last, which is the width; two ranges differ by at most one unit of 32
        (the last one may miss a part of its last unit). A width of fewer than eight units has one range per unit, so
        that no range is empty: more ranks than ranges means ranks without any.
        """
        count = min(MLP_RANGES, -(-width // UNIT))
        return cls(width, UNIT, count, 0, count)

    @classmethod
    def of_experts(cls, num_experts: int) -> Self:
        """Eight ranges of a layer's experts (one each where there are fewer): a "column" is an expert."""
        count = min(MLP_RANGES, num_experts)
        return cls(num_experts, 1, count, 0, count)

    @classmethod
    def single(cls, width: int) -> Self:
        """All columns in one slice: no tree."""
        return cls(width, width, 1, 0, 1)

    def border(self, index: int) -> int:
        """The column of the sum where slice `index` begins."""
        units = -(-self.sum_width // self.unit)
        return min(units * index // self.total * self.unit, self.sum_width)

    @property
    def longest(self) -> int:
        """Columns of the longest slice of the sum."""
        return max(self.border(index + 1) - self.border(index) for index in range(self.total))

    @property
    def borders(self) -> tuple[int, ...]:
        """Where the run's slices begin and end, counted from the run's own first column."""
        before = self.border(self.first)
        return tuple(self.border(index) - before for index in range(self.first, self.last + 1))

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def width(self) -> int:
        """Columns of the run."""
        return self.border(self.last) - self.border(self.first)

    @property
    def whole(self) -> bool:
        """Whether the run is all of the sum, so that its tree ends in one node."""
        return self.count == self.total

    def part(self, first: int, last: int) -> Self:
        """The run of slices [first, last) of the same sum."""
        return replace(self, first=first, last=last)

    def over(self, first: int, last: int) -> Self:
        """The run of whole slices that has the sum's columns [first, last)."""
        borders = [self.border(index) for index in range(self.total + 1)]
        return self.part(borders.index(first), borders.index(last))

    def columns(self, first: int, last: int) -> slice:
        """Which of the run's columns slices [first, last) are."""
        before = self.border(self.first)
        return slice(self.border(first) - before, self.border(last) - before)

    def check_width(self, width: int) -> None:
        """Refuse a weight with another number of columns."""
        if self.width != width:
            raise EngineError(f"slices of {self.width} columns do not fit a weight of {width}")

    def divisible_by(self, unit: int) -> bool:
        """Whether a layout that keeps `unit` columns together can be cut at every border of the sum: the answer is the
        same for every run, so that every number of ranks decides alike."""
        return all(self.border(index) % unit == 0 for index in range(self.total + 1))

    def merges(self) -> list[int]:
        """For each slice, how many additions follow its own sum.

        Sums lie on a stack. A slice's sum is pushed; then, so many times, the two on top are replaced by their sum.
        What is left in the end are the values of `nodes()`, in that order.
        """
        return merges_of([(index, index + 1) for index in range(self.first, self.last)], self.total)

    def nodes(self) -> list[Node]:
        """The largest nodes of the tree that lie within the run, in order: what a rank has to tell the others."""
        return nodes_within(self.first, self.last, self.total)


def is_node(first: int, last: int, total: int) -> bool:
    """Whether the tree over `total` slices has a node over exactly [first, last)."""
    size = 1
    while first + size < last:
        size *= 2
    return first % size == 0 and last == min(first + size, total)


def nodes_within(first: int, last: int, total: int) -> list[Node]:
    """The largest nodes of the tree over `total` slices that lie within the run [first, last), in order."""
    found = []
    while first < last:
        high = max(high for high in range(first + 1, last + 1) if is_node(first, high, total))
        found.append((first, high))
        first = high
    return found


def merges_of(nodes: Sequence[Node], total: int) -> list[int]:
    """For each of some neighbouring nodes, how many additions follow it on the stack of sums."""
    stack: list[Node] = []
    counts = []
    for node in nodes:
        stack.append(node)
        before = len(stack)
        while len(stack) > 1 and is_node(stack[-2][0], stack[-1][1], total):
            (low, _), (_, high) = stack[-2:]
            stack[-2:] = [(low, high)]
        counts.append(before - len(stack))
    return counts


@dataclass(frozen=True, slots=True)
class RankTree:
    """The tree over `total` slices whose ranks own the runs `runs`, one after the other."""

    total: int
    runs: tuple[Node, ...]

    @classmethod
    def even(cls, total: int, size: int) -> Self:
        return cls(total, tuple(rank_run(total, rank, size) for rank in range(size)))

    def nodes(self, rank: int) -> list[Node]:
        """What a rank has to tell the others: the largest nodes within its run."""
        return nodes_within(*self.runs[rank], self.total)

    @property
    def most_nodes(self) -> int:
        """Of any rank."""
        return max(len(self.nodes(rank)) for rank in range(len(self.runs)))

    def steps(self) -> list[tuple[int, int, int]]:
        """How to finish the tree on a stack: (rank, which of its nodes, additions that follow), slice by slice."""
        owned = [(rank, index, node) for rank in range(len(self.runs)) for index, node in enumerate(self.nodes(rank))]
        merges = merges_of([node for _, _, node in owned], self.total)
        return [(rank, index, count) for (rank, index, _), count in zip(owned, merges, strict=True)]


def rank_run(count: int, rank: int, size: int) -> Node:
    """The run of slices that a rank owns, as even as whole slices allow; empty where ranks outnumber slices."""
    return count * rank // size, count * (rank + 1) // size


def finish_tree(total: int, values: Mapping[Node, Any]) -> Any:
    """The sum over all slices from the values of nodes that together cover them once (anything that has `+`)."""

    def value(low: int, high: int) -> Any:
        if (low, high) in values or high - low == 1:
            return values[low, high]
        half = 1
        while 2 * half < high - low:
            half *= 2
        return value(low, low + half) + value(low + half, high)

    return value(0, total)


def add_in_tree(values: Sequence[Any]) -> Any:
    """The sum of one value per slice."""
    return finish_tree(len(values), {(index, index + 1): each for index, each in enumerate(values)})
