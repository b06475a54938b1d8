"""The KV cache as tensors: allocates it, and carries out the block copies of a plan, by itself or through a tier."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.errors import InvariantError
from quire.kernels.types import LayerCache
from quire.models.decoder import Decoder
from quire.ops.interface import Ops
from quire.scheduler.plan import DEVICE, BlockCopy
from quire.worker.transfer import HostTransfer, KVTransfer

_PATIENCE = 1e-4
"""Seconds between two looks at a transfer that is not done."""


class CacheEngine:
    """One paged cache per layer; a copy of a block moves it in every layer of its group.

    Between the device and a tier that tier's `KVTransfer` moves it; the host's is there where it has blocks.
    """

    def __init__(self, decoder: Decoder, ops: Ops, num_blocks: int, block_size: int, num_host_blocks: int = 0,
                 transfers: Sequence[KVTransfer] = (), draft: Decoder | None = None, draft_group: int = 0) -> None:
        self._ops = ops
        groups = decoder.spec.group_of_layer()[decoder.first_layer : decoder.last_layer]
        self.layers: list[LayerCache] = decoder.allocate_caches([num_blocks] * (max(groups) + 1), block_size)
        self.draft_layers: list[LayerCache] = []
        """Of a draft model: a part of the blocks of `draft_group`."""
        if draft is not None:
            self.draft_layers = draft.allocate_caches([num_blocks] * len(draft.spec.cache_groups()), block_size)
        self._stored = self.layers + self.draft_layers
        self._group_of_layer = (*groups, *[draft_group] * len(self.draft_layers))
        host = [HostTransfer(num_host_blocks)] if num_host_blocks else []
        self._transfers = {transfer.name: transfer for transfer in (*host, *transfers)}
        for transfer in self._transfers.values():
            transfer.register(self._stored, self._group_of_layer)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """In their order, as far as it shows: what cannot disturb one another is copied at once."""
        batch: list[BlockCopy] = []
        written: set[tuple[str, int, int]] = set()
        for copy in copies:
            source = (copy.source_tier, copy.group, copy.source)
            target = (copy.target_tier, copy.group, copy.target)
            tiers = batch and (batch[0].source_tier, batch[0].target_tier)
            if tiers != (copy.source_tier, copy.target_tier) or source in written or target in written:
                self._copy_batch(batch)
                batch, written = [], set()
            batch.append(copy)
            written.add(target)
        self._copy_batch(batch)

    def _copy_batch(self, batch: Sequence[BlockCopy]) -> None:
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for copy in batch:
            sources, targets = by_group.setdefault(copy.group, ([], []))
            sources.append(copy.source)
            targets.append(copy.target)
        if batch and batch[0].source_tier == batch[0].target_tier == DEVICE:
            for index, group in enumerate(self._group_of_layer):
                if group in by_group:
                    self._ops.copy_blocks(self._stored[index], *by_group[group])
        elif batch:
            self._transfer(batch[0].source_tier, batch[0].target_tier, by_group)

    def _transfer(self, source_tier: str, target_tier: str, by_group: dict[int, tuple[list[int], list[int]]]) -> None:
        out = source_tier == DEVICE
        transfer = self._transfers.get(target_tier if out else source_tier)
        if transfer is None or DEVICE not in (source_tier, target_tier):
            raise InvariantError(f"no tier to copy from {source_tier} to {target_tier}")
        for group, (sources, targets) in by_group.items():
            transfer.start(group, *((sources, targets) if out else (targets, sources)), out=out)
        # The plan's forward pass, and its next copies, count on the content being there.
        while not transfer.poll():
            time.sleep(_PATIENCE)
