"""Caches in every layout with content that says where it belongs, for tests of what travels between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.kv_spec import KVPart, KVSpec
from quire.kernels.types import LayerCache
from quire.kvtransfer.store import KVStore

UNTOUCHED = -7.0


@dataclass(frozen=True)
class Model:
    """What layers keep: kv heads, width, and a window for each layer."""

    heads: int
    width: int
    windows: tuple[int | None, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        order = sorted(set(self.windows), key=lambda window: -1 if window is None else window)
        return tuple(order.index(window) for window in self.windows)

    @property
    def num_groups(self) -> int:
        return len(set(self.windows))

    def content(self, layer: int, part: str, tokens: int) -> Tensor:
        """[tokens, heads, width]: every number is another one, and exact in float32."""
        shape = (tokens, self.heads, self.width)
        base = ((layer * 2 + (part == "v")) * 4096 + torch.arange(tokens)) * self.heads * self.width
        return (base[:, None, None] + torch.arange(self.heads * self.width).view(1, *shape[1:])).to(torch.float32)


def make_store(model: Model, block_size: int, num_blocks: int, *, tokens_last: bool, layers: range | None = None,
               heads: range | None = None, dtype: torch.dtype = torch.float32, staged: bool | None = None) -> KVStore:
    """An untouched cache of one rank that has some of the layers and some of the heads."""
    layers = layers or range(len(model.windows))
    heads = heads or range(model.heads)
    made = []
    for layer in layers:
        shape = {True: (num_blocks, len(heads), model.width, block_size),
                 False: (num_blocks, len(heads), block_size, model.width)}
        tensors = {name: torch.full(shape[tokens_last and name == "k"], UNTOUCHED, dtype=dtype) for name in "kv"}
        parts = tuple(KVPart(name, len(heads), model.width) for name in "kv")
        made.append(LayerCache(KVSpec("pair", parts, model.windows[layer]), block_size, tensors,
                               tokens_last=("k",) if tokens_last else ()))
    groups = [model.groups[layer] for layer in layers]
    return KVStore(made, groups, first_layer=layers.start, heads=lambda _layer, _part: (model.heads, heads.start),
                   staged=staged)


def slots(store: KVStore, layer: int, part: str, table: list[int]) -> Tensor:
    """[tokens, heads, width] of a table's blocks, as a plain loop reads them; a view where it can be written."""
    index = [(each.layer, one.name) for each, one in store.layout.tensors()].index((layer, part))
    last = [one.tokens_last for _, one in store.layout.tensors()][index]
    raw = store.raw[index]
    rows = [raw[block, :, :, t] if last else raw[block, :, t, :] for block in table
            for t in range(store.layout.block_size)]
    return torch.stack(rows)


def fill(store: KVStore, model: Model, tables: list[list[int]], tokens: int, first_head: int = 0) -> None:
    """Write the content of a sequence's tokens into its blocks, token by token."""
    for index, (layer, part) in enumerate(store.layout.tensors()):
        content = model.content(layer.layer, part.name, tokens)[:, part.first_head : part.first_head + part.num_heads]
        size, raw = store.layout.block_size, store.raw[index]
        for token in range(tokens):
            block = tables[layer.group][token // size]
            if block >= 0:
                target = raw[block, :, :, token % size] if part.tokens_last else raw[block, :, token % size, :]
                target.copy_(content[token])
