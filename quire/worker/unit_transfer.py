"""Moves blocks between the device and a store of units: 256 tokens in the wire form, checked when they come back."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import torch

from quire.errors import KVUnitError
from quire.kernels.types import LayerCache
from quire.kvpool.breaker import CircuitBreaker
from quire.kvpool.keys import UNIT_TOKENS
from quire.kvpool.names import UnitNumbers
from quire.kvpool.rates import StoreRate
from quire.kvpool.staging import Staging
from quire.kvpool.store import UnitStore
from quire.kvpool.unit import check
from quire.kvtransfer.layout import Piece, Span, shares
from quire.kvtransfer.memory import KVMemory
from quire.kvtransfer.store import KVStore
from quire.scheduler.plan import BlockMove
from quire.worker.transfer import ThreadedTransfer


class UnitTransfer(ThreadedTransfer):
    """Out: device blocks to the staging memory, where the tier's writer takes them. In: read, check, then scatter."""

    def __init__(self, name: str, store: UnitStore, numbers: UnitNumbers, staging: Staging, rate: StoreRate,
                 breaker: CircuitBreaker, seed: int) -> None:
        super().__init__()
        self.name = name
        self._store, self._numbers, self._staging = store, numbers, staging
        self._rate, self._breaker, self._seed = rate, breaker, seed
        self._kv: dict[bool, KVMemory] = {}
        """By direction, since each has a buffer of its own on a GPU."""
        self._pieces: list[tuple[Piece, ...]] = []
        """By cache group."""
        self._read: OrderedDict[bytes, memoryview] = OrderedDict()
        """The last units that were read: their blocks need not come at once."""
        self._device: torch.device | None = None

    def register(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int]) -> None:
        outward = KVStore(layers, group_of_layer)
        self._device = outward.device if outward.device.type == "cuda" else None
        self.use(KVStore(layers, group_of_layer), outward)

    def use(self, inward: KVMemory, outward: KVMemory) -> None:
        """Whose blocks are moved: filled from units, and copied out to units."""
        self._kv = {False: inward, True: outward}
        layout = outward.layout
        all_pieces = shares([layout], layout)[0]
        self._pieces = [tuple(piece for piece in all_pieces if piece.group == group)
                        for group in range(layout.num_groups)]
        self.blocks_at_once = self._numbers.blocks_per_unit * layout.num_groups

    def unit_bytes(self) -> list[int]:
        """Content of a unit, by cache group."""
        size = self._kv[True].layout.element_size
        return [sum(piece.nbytes(UNIT_TOKENS, size) for piece in pieces) for pieces in self._pieces]

    def ready(self) -> object:
        if self._device is None:
            return None
        launched = torch.cuda.Event(blocking=True)
        launched.record(torch.cuda.current_stream(self._device))
        return launched

    def wait_until(self, ready: object, out: bool) -> None:
        if isinstance(ready, torch.cuda.Event):
            ready.synchronize()

    def move(self, moves: Sequence[BlockMove], out: bool) -> None:
        for name, mine in self._by_unit(moves):
            if out:
                self._gather(name, mine)
            else:
                self._fetch(name, mine)

    def _by_unit(self, moves: Sequence[BlockMove]) -> list[tuple[bytes, list[BlockMove]]]:
        """Neighbouring blocks of one unit together; the order of the tokens is kept within each group."""
        found: dict[tuple[int, int], list[BlockMove]] = {}
        for move in moves:
            found.setdefault((move.tier // self._numbers.blocks_per_unit, move.group), []).append(move)
        named = []
        for mine in found.values():
            name = self._numbers.name(mine[0].tier)
            if name is None:
                raise KVUnitError("a KV unit was forgotten while it was being moved")
            named.append((name, mine))
        return named

    def _runs(self, moves: list[BlockMove]) -> list[tuple[int, list[int]]]:
        """(first block inside the unit, blocks of the device) where neighbours are wanted together."""
        runs: list[tuple[int, list[int]]] = []
        for move in moves:
            index = move.tier % self._numbers.blocks_per_unit
            if runs and runs[-1][0] + len(runs[-1][1]) == index:
                runs[-1][1].append(move.device)
            else:
                runs.append((index, [move.device]))
        return runs

    def _gather(self, name: bytes, moves: list[BlockMove]) -> None:
        group = moves[0].group
        buffer = self._staging.buffer(name)
        if buffer is None or len(moves) != self._numbers.blocks_per_unit:
            raise KVUnitError("a KV unit is not copied in one piece")
        blocks = [move.device for move in sorted(moves, key=lambda move: move.tier)]
        self._kv[True].gather(self._tables(group, blocks), self._span(len(blocks)), self._pieces[group],
                              memoryview(buffer))

    def _fetch(self, name: bytes, moves: list[BlockMove]) -> None:
        group = moves[0].group
        content = self._unit(name, group)
        kv, size = self._kv[False], self._kv[False].layout.block_size
        for first, blocks in self._runs(moves):
            part = content
            if len(blocks) < self._numbers.blocks_per_unit:
                part = self._cut(content, group, first * size, (first + len(blocks)) * size)
            kv.scatter(self._tables(group, blocks), self._span(len(blocks)), self._pieces[group], part)

    def _unit(self, name: bytes, group: int) -> memoryview:
        if name in self._read:
            self._read.move_to_end(name)
            return self._read[name]
        began = time.perf_counter()
        unit = self._store.read(name)
        if unit is None:
            raise KVUnitError("a KV unit is not in its store any more")
        try:
            content = check(name, unit, self._seed, self.unit_bytes()[group])
        except KVUnitError:
            self._store.stats.units_bad += 1
            self._store.discard(name)
            raise
        self._rate.observe(len(content), time.perf_counter() - began)
        self._breaker.succeeded()
        self._read[name] = content
        while len(self._read) > len(self._pieces):
            self._read.popitem(last=False)
        return content

    def _cut(self, content: memoryview, group: int, start: int, end: int) -> memoryview:
        """Some tokens of a unit, in the wire form as well."""
        size, at, cut = self._kv[False].layout.element_size, 0, bytearray()
        for piece in self._pieces[group]:
            width = piece.nbytes(1, size)
            cut += content[at + start * width : at + end * width]
            at += width * UNIT_TOKENS
        return memoryview(cut)

    def _tables(self, group: int, blocks: list[int]) -> list[list[int]]:
        return [blocks if each == group else [] for each in range(len(self._pieces))]

    def _span(self, num_blocks: int) -> Span:
        return Span(0, num_blocks * self._kv[True].layout.block_size, (0,) * len(self._pieces))

    def close(self) -> None:
        super().close()
        self._kv, self._read = {}, OrderedDict()
