"""KV that is numbers as memory that others read and write: a layer for each cache group, a head for each rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.errors import KVTransferError
from quire.executor.kv_hash import BlockStore
from quire.kvtransfer.layout import LayerLayout, LayoutDescription, PartLayout, Piece, Span
from quire.kvtransfer.memory import Tables

_DTYPE, _WIDTH = "float16", 4
"""A slot is one number of 64 bits; to those who move bytes it is four elements of 16."""


class NumberMemory:
    """What one rank holds: its part of every slot."""

    def __init__(self, stores: Sequence[BlockStore], num_blocks: int, block_size: int, rank: int,
                 num_ranks: int) -> None:
        self._stores, self._size = stores, block_size
        part = PartLayout("slot", num_ranks, _WIDTH, rank, 1, tokens_last=False)
        self.layout = LayoutDescription(_DTYPE, block_size, num_blocks, tuple(
            LayerLayout(group, group, None, (part,)) for group in range(len(stores))), addressable=False)

    def gather(self, tables: Tables, span: Span, pieces: Sequence[Piece], out: memoryview) -> int:
        numbers = [self._stores[piece.group].read(tables[piece.group][at // self._size])[at % self._size]
                   for piece in pieces for at in range(*span.of_group(piece.group))]
        data = np.array(numbers, np.int64).tobytes()
        out[: len(data)] = data
        return len(data)

    def scatter(self, tables: Tables, span: Span, pieces: Sequence[Piece], data: memoryview,
                dtype: str | None = None, scale: float = 1.0) -> None:
        numbers = iter(np.frombuffer(data, np.int64).tolist())
        for piece in pieces:
            for at in range(*span.of_group(piece.group)):
                block = tables[piece.group][at // self._size]
                self._stores[piece.group].write(block, at % self._size, next(numbers))

    def bytes_of(self, region: int) -> memoryview:
        raise KVTransferError("numbers in lists are no bytes")
