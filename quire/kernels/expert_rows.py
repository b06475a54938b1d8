"""Which rows of a step go through which expert: pairs of token and expert, in the order in which GEMMs want them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.slices import Slices, merges_of


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The pairs of some neighbouring experts, by expert, and within one by token."""

    rows: Tensor
    """int64 [pairs]: the token of each."""
    counts: Tensor
    """int64 [experts]: how many pairs each has."""
    places: Tensor
    """int64 [T, chosen], ascending by expert: where each of a token's pairs is; negative: another rank's expert."""
    ranges: Tensor
    """int64 [T, chosen]: the range of experts that it belongs to."""
    weights: Tensor
    """float32 [T, chosen]"""
    all_counts: Tensor
    """int64 [all experts]: as `counts`, of the other ranks' experts too."""


class ExpertRanges:
    """The ranges of experts that one rank has, and how their sums are added (`Slices.of_experts`)."""

    def __init__(self, run: Slices) -> None:
        self.first_range, self.num_ranges = run.first, run.last - run.first
        self.first, self.last = run.border(run.first), run.border(run.last)
        nodes = [(index, index + 1) for index in range(run.first, run.last)]
        self.merges = torch.tensor(merges_of(nodes, run.total))
        """int64 [ranges]: additions that follow each range on the stack of sums."""
        self.num_nodes = self.num_ranges - int(self.merges.sum())
        borders = torch.tensor([run.border(index) for index in range(1, run.total + 1)])
        self._range_of = torch.searchsorted(borders, torch.arange(run.sum_width), right=True)
        self._num_experts = run.sum_width

    def rows_of(self, chosen: Tensor, weights: Tensor) -> ExpertRows:
        """The experts [T, top_k] that a router chose, and their weights, as pairs."""
        experts, order = chosen.sort(dim=-1)
        flat = experts.reshape(-1)
        by_expert = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self._num_experts)
        start = int(counts[: self.first].sum())
        mine = by_expert[start : start + int(counts[self.first : self.last].sum())]
        places = torch.full_like(flat, -1)
        places[mine] = torch.arange(len(mine))
        return ExpertRows(
            mine // chosen.shape[1], counts[self.first : self.last], places.view(chosen.shape),
            self._range_of[experts], weights.gather(-1, order), counts,
        )
