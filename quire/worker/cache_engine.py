"""The KV cache as tensors: allocates it, and a second one in host memory, and carries out block copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import InvariantError
from quire.layers.ops import LayerCache, Ops
from quire.models.decoder import Decoder
from quire.scheduler.plan import DEVICE, HOST, BlockCopy


class CacheEngine:
    """One paged cache per layer; a copy of a block moves it in every layer of its group.

    The host tier has the same layout in (on a GPU, pinned) host memory.
    """

    def __init__(self, decoder: Decoder, ops: Ops, num_blocks: int, block_size: int,
                 num_host_blocks: int = 0) -> None:
        self._ops = ops
        self._group_of_layer = decoder.spec.group_of_layer()[decoder.first_layer : decoder.last_layer]
        num_groups = max(self._group_of_layer) + 1
        self.layers: list[LayerCache] = decoder.allocate_caches([num_blocks] * num_groups, block_size)
        self._host = [_on_host(layer, num_host_blocks) for layer in self.layers] if num_host_blocks else []

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
        for index, group in enumerate(self._group_of_layer):
            if group in by_group:
                self._copy_layer(index, batch[0].source_tier, batch[0].target_tier, *by_group[group])

    def _copy_layer(self, index: int, source_tier: str, target_tier: str, sources: list[int],
                    targets: list[int]) -> None:
        if source_tier == target_tier == DEVICE:
            self._ops.copy_blocks(self.layers[index], sources, targets)
        elif {source_tier, target_tier} == {DEVICE, HOST} and self._host:
            away = source_tier == DEVICE
            source, target = (self.layers, self._host) if away else (self._host, self.layers)
            _copy_between(source[index], target[index], sources, targets)
        else:
            raise InvariantError(f"no tier to copy from {source_tier} to {target_tier}")


def _on_host(layer: LayerCache, num_blocks: int) -> LayerCache:
    pinned = layer.k.device.type == "cuda"

    def like(part: torch.Tensor) -> torch.Tensor:
        # Pages that were never written cost nothing, so all of it is reserved at once.
        return torch.zeros((num_blocks, *part.shape[1:]), dtype=part.dtype, pin_memory=pinned)

    return LayerCache(like(layer.k), like(layer.v), layer.block_size)


def _copy_between(source: LayerCache, target: LayerCache, sources: list[int], targets: list[int]) -> None:
    """One copy for each run of blocks that lie side by side in both: blocks are slices of the first dimension."""
    for begin, end in _runs(sources, targets):
        first, onto, count = sources[begin], targets[begin], end - begin
        target.k[onto : onto + count].copy_(source.k[first : first + count], non_blocking=True)
        target.v[onto : onto + count].copy_(source.v[first : first + count], non_blocking=True)


def _runs(sources: list[int], targets: list[int]) -> list[tuple[int, int]]:
    """Ranges of places in which both lists count up by one."""
    breaks = [i for i in range(1, len(sources))
              if sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1]
    return list(zip([0, *breaks], [*breaks, len(sources)], strict=True))
