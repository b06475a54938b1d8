"""The side that reserved blocks: opens transfers, takes KV in through any transport, says which tokens have arrived."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import KVMismatchError, KVTransferError
from quire.kvtransfer.joined import JoinedRanges
from quire.kvtransfer.layout import LayoutDescription, PartLayout, Piece, Span, check_compatible, shares
from quire.kvtransfer.memory import KVMemory, Tables
from quire.kvtransfer.notes import Note
from quire.kvtransfer.transport.base import OpenTransfers, Receiver
from quire.kvtransfer.transports import DEFAULT_TRANSPORTS, usable

Arrived = Callable[[int, int], None]
"""Tokens start … end-1 are in their blocks, all layers and heads of this rank."""
Ticket = dict[str, Any]
"""What a sender must know about one transfer: plain data, to be sent to it as JSON."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A sender's rank, as it introduced itself."""

    rank: int
    layout: LayoutDescription
    pieces: tuple[Piece, ...]
    """What it sends us."""
    writers: frozenset[int]
    """The ranks of its side that send us something: tokens are here when they have come from all of these."""


class KVReceiver:
    """One rank's receiving end. All its methods may be called from any thread.

    `on_arrival` and `on_error` come from threads of the transports, while the transfer cannot be closed by others.
    `on_error` says why a delivery was refused that had come whole; a sender that is lost says nothing here.
    """

    def __init__(self, store: KVMemory, secret: bytes, transports: Sequence[str] = DEFAULT_TRANSPORTS,
                 host: str = "127.0.0.1", convert: bool = False) -> None:
        """`convert`: take KV of another element type."""
        self._store, self._convert = store, convert
        self._transfers = OpenTransfers()
        self._receivers: dict[str, Receiver] = {}
        try:
            for each in usable(transports):
                self._receivers[each.name] = each.listen(self._transfers, secret, self._greet, host)
        except BaseException:
            self.stop()
            raise

    def address(self) -> dict[str, Any]:
        """What a `KVSender` needs to reach this rank, as plain data."""
        return {"layout": self._store.layout.to_data(),
                "transports": {name: receiver.address for name, receiver in self._receivers.items()}}

    def open(self, transfer: int, epoch: int, tables: Tables, starts: Sequence[int], end: int,
             on_arrival: Arrived, on_error: Callable[[str], None] | None = None) -> Ticket:
        """Take tokens up to `end` into these blocks, of group g from `starts[g]` on; what the sender must be told.

        The blocks are this transfer's until `close`: nobody reads or writes them meanwhile, except tokens that have
        arrived.
        """
        landing = _Landing(self._store, [list(table) for table in tables], tuple(starts), end, on_arrival, on_error)
        self._transfers.open(transfer, epoch, landing)
        return {"transfer": transfer, "epoch": epoch, "starts": list(starts), "end": end, "tables": landing.tables}

    def close(self, transfer: int) -> None:
        """It is over, done or not: when this returns no byte of the transfer is written any more."""
        self._transfers.close(transfer)

    def stop(self) -> None:
        for receiver in self._receivers.values():
            receiver.stop()

    def _greet(self, hello: bytes) -> tuple[Peer, bytes]:
        """Understand a sender: which ranks its side has, which of them it is."""
        try:
            data = json.loads(hello)
            rank, described = data["rank"], data["layouts"]
            layouts = [LayoutDescription.from_data(each) for each in described]
            layout = layouts[rank] if isinstance(rank, int) and rank >= 0 else None
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise KVTransferError("a sender of KV introduced itself with something else than its layouts") from error
        if layout is None:
            raise KVTransferError("a sender of KV has no rank")
        for each in layouts:
            check_compatible(self._store.layout, each, self._convert)
        sent = shares(layouts, self._store.layout)
        writers = frozenset(index for index, pieces in enumerate(sent) if pieces)
        if rank not in writers:
            raise KVMismatchError(f"rank {rank} of the sender has nothing that belongs here", "model")
        return Peer(rank, layout, sent[rank], writers), b""


@dataclass(eq=False)
class _Landing:
    """One transfer's blocks. The transports hold the transfer's lock whenever they call."""

    store: KVMemory
    tables: list[list[int]]
    starts: tuple[int, ...]
    end: int
    on_arrival: Arrived
    on_error: Callable[[str], None] | None
    _came: JoinedRanges = field(default_factory=JoinedRanges)
    """Tokens that the sender's ranks have delivered."""

    def __post_init__(self) -> None:
        layout = self.store.layout
        size = layout.block_size
        if len(self.starts) != len(self.tables) or len(self.tables) < layout.num_groups:
            raise KVTransferError(f"a transfer needs a block table for each of {layout.num_groups} cache groups")
        self._writable = [frozenset(block for block in table[start // size : -(-self.end // size)] if block >= 0)
                          for table, start in zip(self.tables, self.starts, strict=True)]
        if any(block >= layout.num_blocks for blocks in self._writable for block in blocks):
            raise KVTransferError("a block table names blocks that the cache does not have")
        self._regions: list[tuple[int, PartLayout]] = [(layer.group, part) for layer, part in layout.tensors()]

    def place(self, region: int, offset: int, nbytes: int) -> memoryview:
        if region >= len(self._regions) or not self.store.layout.addressable:
            raise KVTransferError(f"there is no memory {region} to write into")
        group, part = self._regions[region]
        size = self.store.layout.block_bytes(part)
        first, count = offset // size, nbytes // size
        if offset % size or nbytes % size or count == 0 or not self._writable[group].issuperset(
                range(first, first + count)):
            raise KVTransferError("a write outside the blocks of its transfer")
        return self.store.bytes_of(region)[offset : offset + nbytes]

    def arrived(self, peer: object, note: bytes, payload: memoryview) -> None:
        assert isinstance(peer, Peer)
        try:
            self._take(peer, note, payload)
        except Exception as error:
            if self.on_error is not None:
                self.on_error(str(error))
            raise

    def _take(self, peer: Peer, note: bytes, payload: memoryview) -> None:
        said = Note.from_bytes(note)
        if not said.start < said.end <= self.end or said.start < min(self.starts):
            raise KVTransferError(f"tokens {said.start} to {said.end} are not those of this transfer")
        if said.wire:
            span = Span(said.start, said.end, self.starts)
            layout = peer.layout
            self.store.scatter(self.tables, span, peer.pieces, payload, layout.dtype, layout.scale)
        for start, end in self._came.add(peer.rank, said.start, said.end, peer.writers):
            self.on_arrival(start, end)
