"""Steps of a draft model that has several tokens of each sequence to catch up with: all are rows of a captured step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.ops.interface import Ops
from quire.scheduler.plan import PlanEntry
from quire.worker.gpu.batches import is_decode, ladder, rung_for
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


class SpanRunner(DraftRunner):
    """The first pass of a step's drafts computes all tokens that the target has accepted since: up to `span` of each
    sequence, every one a row of a captured step."""

    def __init__(self, decoder: Decoder | DraftHead, ops: Ops, table: DeviceTable, device: torch.device, *, span: int,
                 most_rows: int, max_num_seqs: int, nodes: int = 0, **options: Any) -> None:
        """`most_rows`: of such a step. `nodes`: of each tree in a pass; 0: there are no trees."""
        self._wide_rungs = [rung for rung in ladder(max_num_seqs) if rung * span <= most_rows]
        self.tree_rungs = [rung for rung in self._wide_rungs if nodes and rung * nodes <= MOST_NODE_ROWS]
        """Numbers of trees that passes are made for."""
        node_rows = [rung * nodes for rung in self.tree_rungs]
        super().__init__(decoder, ops, table, device, max_num_seqs=max_num_seqs,
                         least_rows=max(node_rows, default=0), **options)
        self.span = span
        self._wide = DecodeBuffers.allocate(span * max(self._wide_rungs, default=0), len(self.contexts.windows), 0,
                                            ops.dtype, device)
        self.contexts.reserve({*self.rungs, *(rung * span for rung in self._wide_rungs), *node_rows})
        self._wide_graphs: GraphCache | None = None
        if self.graphs is not None:
            self._wide_graphs = GraphCache(device, self._decode_last, self.graphs.pool)

    def capture(self, max_num_seqs: int) -> None:
        if self._wide_graphs is not None:
            self._wide_graphs.capture(self._wide_rungs)
        super().capture(max_num_seqs)

    def close(self) -> None:
        if self._wide_graphs is not None:
            self._wide_graphs.close()
        self._wide_graphs = None
        super().close()

    @property
    def replays(self) -> int:
        """Passes that were replayed from graphs."""
        return sum(graphs.replays for graphs in (self.graphs, self._wide_graphs) if graphs is not None)

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

    def draft_after(self, chains: np.ndarray, judged: StepLaunches, passes: int) -> bool:
        """So many passes behind chains (`kernels.triton.chains`) whose judges are under way; False, and nothing is
        launched, where there are too many of them, or their draws have to be kept."""
        count = len(chains)
        if count > max(self._wide_rungs, default=0) or self._kept is not None:
            return False
        rung = rung_for(self._wide_rungs, count)
        padded = np.full((rung, 4), -1, np.int32)
        padded[:count] = chains
        self.follow(padded, judged)
        self._run_wide(rung)
        for _ in range(1, passes):
            self.launch_decode(rung_for(self.rungs, count))
        self._staged = []
        return True

    def follow(self, chains: np.ndarray, judged: StepLaunches) -> None:
        """Stage the tokens that each chain has become, as the device finds them in what was drawn last."""
        stage = Stage()
        stage.add("chains", chains.reshape(-1))
        sent = stage.send(self._device)
        judged.follow_chains(stage.view(sent, "chains").view(-1, 4), self._wide, self.span)

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
