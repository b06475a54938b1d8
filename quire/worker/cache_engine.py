"""The KV cache as tensors: allocates it, makes the block copies of a plan, and starts its transfers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire.kernels.types import LayerCache
from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.ops.interface import Ops
from quire.scheduler.arrivals import ArrivalBox
from quire.scheduler.plan import BlockCopy, StepPlan, TransferReport
from quire.worker.request_table import RequestTable
from quire.worker.transfer import HostTransfer, KVTransfer


class CacheEngine:
    """One paged cache per layer; a copy of a block is made in every layer of its group.

    Between the device and a tier that tier's `KVTransfer` moves blocks, and reports to `arrivals`; the host's is there
    where it has blocks.
    """

    def __init__(self, decoder: Decoder, ops: Ops, num_blocks: int | Sequence[int], block_size: int,
                 num_host_blocks: int = 0, transfers: Sequence[KVTransfer] = (),
                 draft: Decoder | DraftHead | None = None, draft_group: int = 0) -> None:
        """`num_blocks` of every cache group, or by group."""
        self._ops = ops
        groups = decoder.spec.group_of_layer()[decoder.first_layer : decoder.last_layer]
        blocks = [num_blocks] * (1 + max(*groups, draft_group)) if isinstance(num_blocks, int) else num_blocks
        self.layers: list[LayerCache] = decoder.allocate_caches(blocks, block_size)
        self.groups = list(groups)
        """Of each layer."""
        self.draft_layers: list[LayerCache] = []
        """Of a draft model: a part of the blocks of `draft_group`."""
        if draft is not None:
            own_groups = len(draft.spec.cache_groups())
            self.draft_layers = draft.allocate_caches([blocks[draft_group]] * own_groups, block_size)
        self._stored = self.layers + self.draft_layers
        self._group_of_layer = (*groups, *[draft_group] * len(self.draft_layers))
        self.arrivals = ArrivalBox()
        """Where transfers report."""
        self._transfers: dict[str, KVTransfer] = {}
        for transfer in (*([HostTransfer(num_host_blocks)] if num_host_blocks else []), *transfers):
            self.connect(transfer)

    def connect(self, transfer: KVTransfer) -> None:
        """Move blocks to and from one more tier."""
        transfer.register(self._stored, self._group_of_layer)
        self._transfers[transfer.name] = transfer

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """In their order, as far as it shows: what cannot disturb one another is copied at once."""
        batch: list[BlockCopy] = []
        written: set[tuple[int, int]] = set()
        for copy in copies:
            if (copy.group, copy.source) in written or (copy.group, copy.target) in written:
                self._copy_batch(batch)
                batch, written = [], set()
            batch.append(copy)
            written.add((copy.group, copy.target))
        self._copy_batch(batch)

    def _copy_batch(self, batch: Sequence[BlockCopy]) -> None:
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for copy in batch:
            sources, targets = by_group.setdefault(copy.group, ([], []))
            sources.append(copy.source)
            targets.append(copy.target)
        for index, group in enumerate(self._group_of_layer):
            if group in by_group:
                self._ops.copy_blocks(self._stored[index], *by_group[group])

    def move_tokens(self, table: RequestTable, moves: Sequence[tuple[int, int, int]]) -> None:
        """(row, from, to): the KV of a token, to another place of its row; also hidden states of the target, where a
        draft head keeps them. A draft model's own KV stays: it has none of what was drafted by others."""
        rows, sources, targets = np.array(moves, np.int64).T
        slots: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, group in zip(self._stored, self._group_of_layer, strict=True):
            if layer.spec.kind != "feature" and any(layer is own for own in self.draft_layers):
                continue
            if group not in slots:
                slots[group] = table.slots(group, rows, sources), table.slots(group, rows, targets)
            self._ops.copy_slots(layer, *slots[group])

    def start_transfers(self, plan: StepPlan) -> None:
        """Once the copies of the plan are made, or launched. Whatever cannot be started reports that it failed."""
        for number in plan.cancels:
            for transfer in self._transfers.values():
                transfer.cancel(number)
        for start in plan.transfers:
            mover = self._transfers.get(start.tier)
            try:
                if mover is None:
                    raise LookupError(f"there is no tier {start.tier!r}")
                mover.start(start, self.arrivals.put)
            except Exception as error:
                self.arrivals.put(TransferReport(start.number, 0, finished=True, error=str(error)))

    def refuse_transfers(self, plan: StepPlan, error: BaseException) -> None:
        """The plan was lost before its transfers were started."""
        for start in plan.transfers:
            self.arrivals.put(TransferReport(start.number, 0, finished=True, error=f"the step was lost: {error}"))

    def close(self) -> None:
        for transfer in self._transfers.values():
            transfer.close()
        self._transfers = {}
