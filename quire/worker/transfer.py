"""The half of a connector that moves KV: content of blocks between the device's caches and one tier.

The other half, `kvcache/connector.py`, says what the tier holds and names its blocks. They meet in the block copies
of a plan, and in whether its step came back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from quire.kernels.types import LayerCache


class KVTransfer(ABC):
    """Moves blocks for one tier.

    Contract: transfers of one plan are started in their order, and all are polled to their end before its forward pass.
    One that failed loses its step: its sequences end with that error, and nothing of it was stored.
    """

    name: str
    """The tier's name in block copies."""

    @abstractmethod
    def register(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int]) -> None:
        """The device's caches, once and for all: a block of a group is a slice of each of its layers."""

    @abstractmethod
    def start(self, group: int, device: list[int], tier: list[int], out: bool) -> None:
        """Begin to move blocks of one cache group, pairwise, out to the tier or back."""

    @abstractmethod
    def poll(self) -> bool:
        """Is all that was started done? Raises what made a transfer fail."""


class HostTransfer(KVTransfer):
    """Host memory in the layout of the caches, pinned on a GPU. Copies take their place in the order of its stream."""

    name = "host"

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._layers: list[LayerCache] = []
        self._host: list[LayerCache] = []
        self._group_of_layer: list[int] = []

    def register(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int]) -> None:
        self._layers, self._group_of_layer = list(layers), list(group_of_layer)
        self._host = [_on_host(layer, self._num_blocks) for layer in layers]

    def start(self, group: int, device: list[int], tier: list[int], out: bool) -> None:
        for index, belongs in enumerate(self._group_of_layer):
            if belongs == group and out:
                _copy_between(self._layers[index], self._host[index], device, tier)
            elif belongs == group:
                _copy_between(self._host[index], self._layers[index], tier, device)

    def poll(self) -> bool:
        return True


def _on_host(layer: LayerCache, num_blocks: int) -> LayerCache:
    def like(part: torch.Tensor) -> torch.Tensor:
        # Pages that were never written cost nothing, so all of it is reserved at once.
        size = (num_blocks, *part.shape[1:])
        return torch.zeros(size, dtype=part.dtype, pin_memory=part.device.type == "cuda")

    return LayerCache(layer.spec, layer.block_size, {name: like(part) for name, part in layer.tensors.items()})


def _copy_between(source: LayerCache, target: LayerCache, sources: list[int], targets: list[int]) -> None:
    """One copy for each run of blocks that lie side by side in both: blocks are slices of the first dimension."""
    for begin, end in _runs(sources, targets):
        first, onto, count = sources[begin], targets[begin], end - begin
        for name, part in source.tensors.items():
            target.tensors[name][onto : onto + count].copy_(part[first : first + count], non_blocking=True)


def _runs(sources: list[int], targets: list[int]) -> list[tuple[int, int]]:
    """Ranges of places in which both lists count up by one."""
    breaks = [i for i in range(1, len(sources))
              if sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1]
    return list(zip([0, *breaks], [*breaks, len(sources)], strict=True))
