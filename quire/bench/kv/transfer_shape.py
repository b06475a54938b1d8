"""The caches that `quire bench transfer` moves KV between: a model's shape and no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.kvtransfer.store import KVStore


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    heads: int
    width: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * self.width * 2 * 4

    def store(self, block_size: int, num_blocks: int) -> KVStore:
        """Caches as a CPU has them, every page of them written once."""
        import torch

        from quire.kernels.kv_spec import KVSpec
        from quire.kernels.types import LayerCache
        from quire.kvtransfer.store import KVStore

        spec = KVSpec.pair(self.heads, self.width)
        layers = []
        for _ in range(self.layers):
            tensors = {"k": torch.ones(num_blocks, self.heads, self.width, block_size),
                       "v": torch.ones(num_blocks, self.heads, block_size, self.width)}
            layers.append(LayerCache(spec, block_size, tensors, tokens_last=("k",)))
        return KVStore(layers, [0] * self.layers)
