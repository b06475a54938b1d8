"""Steps of a draft model that has several tokens of each sequence to catch up with: all are rows of a captured step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.errors import InvariantError
from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.ops.interface import Ops
from quire.scheduler.plan import PlanEntry
from quire.worker.gpu.batches import aligned, is_decode, ladder, rung_for
from quire.worker.gpu.decode_buffers import DecodeBuffers
from quire.worker.gpu.drafter import DraftRunner
from quire.worker.gpu.draws import DrawnStep
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.launches import StepLaunches
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import DeviceTable

MOST_NODE_ROWS = 256
"""Nodes of all trees in a pass of the model that drafts: with more sequences there are chains."""
_NO_TOKEN = PlanEntry(-1, 0, 1, sample=False)
"""A row of padding."""


def _wide_rungs(max_num_seqs: int, span: int, most_rows: int) -> list[int]:
    return [rung for rung in ladder(max_num_seqs) if rung * span <= most_rows]


def tree_rungs(max_num_seqs: int, span: int, most_rows: int, nodes: int) -> list[int]:
    """Numbers of trees that passes are made for."""
    return [rung for rung in _wide_rungs(max_num_seqs, span, most_rows) if nodes and rung * nodes <= MOST_NODE_ROWS]


class SpanRunner(DraftRunner):
    """The first pass of a step's drafts computes all tokens that the target has accepted since: up to `span` of each
    sequence, every one a row of a captured step."""

    def __init__(self, decoder: Decoder | DraftHead, ops: Ops, table: DeviceTable, device: torch.device, *, span: int,
                 most_rows: int, max_num_seqs: int, nodes: int = 0, **options: Any) -> None:
        """`most_rows`: of such a step. `nodes`: of each tree in a pass; 0: there are no trees."""
        self._wide_rungs = _wide_rungs(max_num_seqs, span, most_rows)
        self.tree_rungs = tree_rungs(max_num_seqs, span, most_rows, nodes)
        node_rows = [rung * nodes for rung in self.tree_rungs]
        super().__init__(decoder, ops, table, device, max_num_seqs=max_num_seqs,
                         least_rows=max(node_rows, default=0), **options)
        self.span = span
        self._wide = DecodeBuffers.allocate(span * max(self._wide_rungs, default=0), len(self.contexts.windows), 0,
                                            ops.dtype, device)
        self.contexts.reserve({*self.rungs, *(rung * span for rung in self._wide_rungs), *node_rows})
        self._chains = torch.full((aligned(4 * max(self._wide_rungs, default=0)),), -1, dtype=torch.int32,
                                  device=device)
        self._judges: StepLaunches | None = None
        self._wide_graphs: GraphCache | None = None
        self._ahead_graphs: GraphCache | None = None
        if self.graphs is not None:
            self._wide_graphs = GraphCache(device, self._decode_last, self.graphs.pool)
            self._ahead_graphs = GraphCache(device, self._draft_after, self.graphs.pool)

    def follow(self, judges: StepLaunches) -> None:
        """From here on chains may be drafted behind steps of a target that judges those before (`draft_after`)."""
        self._judges = judges

    def capture(self, max_num_seqs: int) -> None:
        if self._wide_graphs is not None:
            self._wide_graphs.capture(self._wide_rungs)
        if self._ahead_graphs is not None and self._judges is not None:
            self._ahead_graphs.capture((rung, self.span - 1) for rung in self._wide_rungs)
        super().capture(max_num_seqs)

    def close(self) -> None:
        for graphs in (self._wide_graphs, self._ahead_graphs):
            if graphs is not None:
                graphs.close()
        self._wide_graphs = self._ahead_graphs = self._judges = None
        super().close()

    @property
    def replays(self) -> int:
        """Passes, or all that were launched behind a step together, that were replayed from graphs."""
        graphs = (self.graphs, self._wide_graphs, self._ahead_graphs)
        return sum(each.replays for each in graphs if each is not None)

    def launch(self, entries: list[PlanEntry]) -> None:
        if is_decode(entries) or not self._fits(entries):
            super().launch(entries)
            return
        count, span = len(entries), self.span
        rung = rung_for(self._wide_rungs, count)
        rows: list[PlanEntry] = []
        for entry in entries:
            rows += [_NO_TOKEN] * (span - entry.num_tokens)
            rows += [PlanEntry(entry.row, entry.start + i, 1, sample=False) for i in range(entry.num_tokens)]
        self._wide.staged(rows, 0).send(self._device, self._wide.stage)
        self._run_wide(rung)
        drawn = self.launches.drawn[0]
        pending = PendingStep(0, count, range(count), drawn[:count])
        self.draws.draw(DrawnStep(pending, entries, range(count), self.launches.buffers.logits, drawn))
        self._staged = [(entry.row, entry.start + entry.num_tokens) for entry in entries]

    def asks_more(self, rows: np.ndarray) -> bool:
        """Whether the drawing kernel is not enough for drafts of these rows."""
        return bool(self._table.bits(rows).any())

    def draft_after(self, chains: np.ndarray, passes: int) -> bool:
        """So many passes behind chains (`kernels.triton.chains`) whose judges are under way; False, and nothing is
        launched, where there are too many of them, or their draws have to be kept."""
        count = len(chains)
        if self._judges is None or count > max(self._wide_rungs, default=0) or self._kept is not None:
            return False
        rung = rung_for(self._wide_rungs, count)
        padded = np.full(4 * rung, -1, np.int32)
        padded[: 4 * count] = chains.reshape(-1)
        stage = Stage()
        stage.add("chains", padded)
        stage.send(self._device, self._chains)
        self._staged = []
        if self._ahead_graphs is not None and self._replays and self._ahead_graphs.holds((rung, passes)):
            self._ahead_graphs.run((rung, passes))
            return True
        self._follow_chains(rung)
        self._run_wide(rung)
        for _ in range(1, passes):
            self.launch_decode(rung)
        return True

    def _draft_after(self, shape: tuple[int, int], separate_rope: bool = False) -> None:
        """Passes of as many chains as are staged, for one graph."""
        rung, passes = shape
        self._follow_chains(rung)
        self.launches.decode_last(self._wide, rung, self.span)
        for _ in range(1, passes):
            self.launches.decode(rung, separate_rope)

    def _follow_chains(self, rung: int) -> None:
        if self._judges is None:
            raise InvariantError("nobody is followed by drafts")
        self._judges.follow_chains(self._chains[: 4 * rung].view(-1, 4), self._wide, self.span)

    def _run_wide(self, rung: int) -> None:
        if self._wide_graphs is not None and self._replays:
            self._wide_graphs.run(rung)
        else:
            self._decode_last(rung)

    def _fits(self, entries: Sequence[PlanEntry]) -> bool:
        most = max(self._wide_rungs, default=0)
        return len(entries) <= most and all(entry.sample and entry.num_tokens <= self.span for entry in entries)

    def _decode_last(self, rung: int, separate_rope: bool = True) -> None:
        self.launches.decode_last(self._wide, rung, self.span)
