"""Scales of keys and values that calibration found and a checkpoint brings: what an fp8 cache of each layer is divided
by."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.quantized import are_scales
from quire.kernels.types import LayerCache
from quire.models.shard import Shard


class KVScales:
    """Of the layers of a shard, one number for all heads or one for each. Layers without any are stored as they are."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._found: dict[tuple[int, str], Tensor] = {}

    def receive(self, layer: int, part: str, scale: Tensor, name: str) -> None:
        """`part`: k or v."""
        if not self._shard.first_layer <= layer < self._shard.last_layer:
            return
        heads = self._shard.spec.layers[layer].attention.num_kv_heads
        values = scale.to(torch.float32).flatten()
        if values.numel() not in (1, heads) or not are_scales(values):
            raise ModelLoadError(f"tensor {name!r} is no scale of {heads} kv heads: one positive number, or one each")
        self._found[layer, part] = values.expand(heads)

    def give_to(self, cache: LayerCache, layer: int) -> None:
        """Where the cache is in fp8; another type needs no scales."""
        parts = [self._found.get((layer, part)) for part in ("k", "v")]
        if parts == [None, None] or cache.spec.kind != "pair" or cache.k.dtype != torch.float8_e4m3fn:
            return
        heads = self._shard.layer(layer).heads
        mine = slice(heads.first_kv, heads.last_kv)
        both = [torch.ones(mine.stop - mine.start) if part is None else part[mine] for part in parts]
        cache.scales = torch.stack([part.to(cache.k.device) for part in both]).contiguous()
