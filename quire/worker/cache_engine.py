"""The KV cache as tensors: allocates it and carries out block copies."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import InvariantError
from quire.layers.ops import LayerCache, Ops
from quire.models.decoder import Decoder
from quire.scheduler.plan import DEVICE, BlockCopy


class CacheEngine:
    """One paged cache per layer; a copy of a block moves it in every layer of its group."""

    def __init__(self, decoder: Decoder, ops: Ops, num_blocks: int, block_size: int) -> None:
        self._ops = ops
        self._group_of_layer = decoder.spec.group_of_layer()[decoder.first_layer : decoder.last_layer]
        num_groups = max(self._group_of_layer) + 1
        self.layers: list[LayerCache] = decoder.allocate_caches([num_blocks] * num_groups, block_size)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        by_group: dict[int, tuple[list[int], list[int]]] = {}
        for copy in copies:
            if (copy.source_tier, copy.target_tier) != (DEVICE, DEVICE):
                raise InvariantError(f"no tier to copy from {copy.source_tier} to {copy.target_tier}")
            sources, targets = by_group.setdefault(copy.group, ([], []))
            sources.append(copy.source)
            targets.append(copy.target)
        for layer, group in zip(self.layers, self._group_of_layer, strict=True):
            if group in by_group:
                self._ops.copy_blocks(layer, *by_group[group])
