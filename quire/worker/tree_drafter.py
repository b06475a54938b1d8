"""Proposes draft trees with a model: level by level it expands the likeliest nodes, then the best of all are kept.

Nodes are chosen for their value, so they are judged as a deterministic proposal, whatever the verifier.

Where ranks share the model that drafts, each of them computes every node. The one that has the logits chooses: it tells
the others which nodes come next, and in the end what the trees are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quire.kernels.cpu.sampling import CpuSampling
from quire.sampling.batch import SamplingRow
from quire.sampling.sampler import OK
from quire.scheduler.plan import PlanEntry
from quire.speculation.growing import in_order
from quire.speculation.tree import ROOT, TreeShape
from quire.worker.drafter import MOST_AT_ONCE, Drafter, DraftModel, with_drafts, without_logprobs
from quire.worker.draws import draw_rows
from quire.worker.request_table import RequestTable
from quire.worker.tree_inputs import Node

_DRAWN = 0.5
"""Chance, on top of its half, of the token that the model draws with the target's own noise; others have half."""


@dataclass(slots=True)
class _Candidate:
    token: int
    parent: int
    """Among the candidates; ROOT: it follows the text."""
    depth: int
    chance: float
    """Of the whole branch, as far as the model knows."""
    number: int = -1
    """As a node that was expanded: its place behind the text."""


@dataclass(slots=True)
class _Growing:
    """A tree under way."""

    entry: PlanEntry
    state: SamplingRow
    candidates: list[_Candidate] = field(default_factory=list)
    num_expanded: int = 0

    def line(self, at: int) -> list[_Candidate]:
        """The candidates from the text to one of them."""
        found: list[_Candidate] = []
        while at != ROOT:
            found.append(self.candidates[at])
            at = found[-1].parent
        return found[::-1]

    def add(self, parent: int, children: Sequence[tuple[int, float]]) -> None:
        depth, chance = 1, 1.0
        if parent != ROOT:
            depth, chance = self.candidates[parent].depth + 1, self.candidates[parent].chance
        self.candidates += [_Candidate(token, parent, depth, chance * mine) for token, mine in children]

    def best(self, depth: int, most: int) -> list[int]:
        """Candidates of one depth to be expanded: only so many nodes have a place."""
        level = [i for i, each in enumerate(self.candidates) if each.depth == depth]
        level.sort(key=lambda i: -self.candidates[i].chance)
        return level[: min(most, self.entry.device_drafts - self.num_expanded)]

    def filled(self) -> PlanEntry:
        """The entry with the best nodes. A child is never likelier than its parent, and comes after it."""
        ranked = sorted(range(len(self.candidates)), key=lambda i: -self.candidates[i].chance)
        order = sorted(ranked[: self.entry.device_drafts], key=lambda i: self.candidates[i].depth)
        place = {at: node for node, at in enumerate(order)}
        parents = tuple(place.get(self.candidates[at].parent, ROOT) for at in order)
        tokens, parents = in_order(tuple(self.candidates[at].token for at in order), parents)
        return replace(self.entry, drafts=tokens, parents=parents, num_tokens=1 + len(tokens), device_drafts=0,
                       draft_depth=0)


class TreeDrafter:
    """Trees for the entries that ask for one (`PlanEntry.draft_depth`), chains for those that do not."""

    def __init__(self, chains: Drafter, table: RequestTable, shape: TreeShape, rejection: bool) -> None:
        self.model: DraftModel = chains.model
        self._chains = chains
        self._passes = chains.passes
        self._table = table
        self._shape = shape
        self._sampling = CpuSampling()
        self._rejection = rejection

    def propose(self, entries: Sequence[PlanEntry]) -> tuple[list[PlanEntry], dict[int, Tensor]]:
        asking = [i for i, entry in enumerate(entries) if entry.draft_depth]
        others = [replace(entry, device_drafts=0) if entry.draft_depth else entry for entry in entries]
        filled, weights = self._chains.propose(others)
        for i, entry in zip(asking, self._grown([entries[i] for i in asking]), strict=True):
            filled[i] = entry
        return filled, weights

    def _grown(self, entries: Sequence[PlanEntry]) -> list[PlanEntry]:
        growing = [_Growing(entry, without_logprobs(self._table.sampling(entry.row))) for entry in entries]
        passes = []
        for entry in entries:
            start, count = self.model.catch_up(entry)
            passes.append(PlanEntry(entry.row, start, min(count, MOST_AT_ONCE), count <= MOST_AT_ONCE))
        logits = self.model.logits(passes) if passes else None
        if logits is not None:
            ready = [i for i, one in enumerate(passes) if one.sample]
            found = self._children(logits[ready], [growing[i].state for i in ready])
            for i, children in zip(ready, found, strict=True):
                growing[i].add(ROOT, children)
        chooses = self._passes is None or self._passes.place.is_sampler
        for depth in range(1, max((entry.draft_depth for entry in entries), default=0)):
            self._expand(growing, depth, chooses)
        if not entries or self._passes is None:
            return [each.filled() for each in growing]
        mine = None
        if chooses:
            filled = [each.filled() for each in growing]
            mine = [entry.drafts for entry in filled] + [entry.parents for entry in filled]
        told, count = self._passes.tell_all(mine), len(entries)
        return with_drafts(entries, dict(enumerate(told[:count])), dict(enumerate(told[count:])))

    def _expand(self, growing: Sequence[_Growing], depth: int, chooses: bool) -> None:
        """One pass: the best nodes of a level get children."""
        owners = self._chosen(growing, depth) if chooses else []
        nodes = [Node(each.entry.row, each.entry.start + 1, tuple(one.number for one in each.line(at)))
                 for each, at in owners]
        tokens = [each.candidates[at].token for each, at in owners]
        if self._passes is not None:
            mine = [(token, node.row, node.first, *node.path) for token, node in zip(tokens, nodes, strict=True)]
            told = self._passes.tell_all(mine if chooses else None)
            tokens = [token for token, *_ in told]
            nodes = [Node(row, first, tuple(path)) for _, row, first, *path in told]
        if not nodes:
            return
        for token, node in zip(tokens, nodes, strict=True):
            self._table.tokens[node.row, node.first + node.path[-1]] = token
        logits = self.model.node_logits(nodes)
        if logits is None or not chooses:
            return
        states = [each.state.ahead([one.token for one in each.line(at)]) for each, at in owners]
        for (each, at), children in zip(owners, self._children(logits, states), strict=True):
            each.add(at, children)

    def _chosen(self, growing: Sequence[_Growing], depth: int) -> list[tuple[_Growing, int]]:
        """The best nodes of a level, each with the next free place of its tree."""
        owners: list[tuple[_Growing, int]] = []
        most = max(1, min(self._shape.width, self._shape.nodes // self._shape.depth))
        for each in growing:
            if depth >= each.entry.draft_depth:
                continue
            for at in each.best(depth, most):
                each.candidates[at].number = each.num_expanded
                each.num_expanded += 1
                owners.append((each, at))
        return owners

    def _children(self, logits: Tensor, rows: list[SamplingRow]) -> list[list[tuple[int, float]]]:
        """Of each row: tokens that may come next, and how likely each is.

        Under the coupled verifier a token that is drawn with the target's noise is the best guess at what the target
        draws. Rejection has its own noise, of which no draft may know: there it is the likeliest alone.
        """
        if not rows:
            return []
        width = self._shape.width
        heat = torch.tensor([row.params.temperature or 1.0 for row in rows])[:, None]
        chances, tokens = (logits / heat).softmax(-1).topk(min(width, logits.shape[1]))
        likeliest = [list(zip(*pair, strict=True)) for pair in zip(tokens.tolist(), chances.tolist(), strict=True)]
        warm = [i for i, row in enumerate(rows) if not row.params.greedy and not self._rejection]
        if not warm:
            return [[(token, chance) for token, chance in each if chance > 0.0] for each in likeliest]
        drawn = draw_rows(logits, rows, self._sampling)
        for i in warm:
            if drawn.status[i] != OK:
                likeliest[i] = []
                continue
            token = drawn.tokens[i]
            own = dict(likeliest[i]).get(token, 0.0)
            others = [(each, (1.0 - _DRAWN) * chance) for each, chance in likeliest[i] if each != token]
            likeliest[i] = [(token, _DRAWN + (1.0 - _DRAWN) * own), *others[: width - 1]]
        return [[(token, chance) for token, chance in each if chance > 0.0] for each in likeliest]
