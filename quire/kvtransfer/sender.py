"""The side that computed KV: writes token ranges of a sequence into the blocks that the other side reserved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from quire.errors import KVMismatchError, KVTransferError
from quire.kvtransfer.layout import LayoutDescription, Piece, Span, check_compatible, shares, spans, written_straight
from quire.kvtransfer.memory import KVMemory, Tables
from quire.kvtransfer.notes import Note
from quire.kvtransfer.receiver import Ticket
from quire.kvtransfer.runs import merged_runs
from quire.kvtransfer.transport.base import ALL_INTERFACES, Address, Delivery, PeerLostError, Write, Writer
from quire.kvtransfer.transports import DEFAULT_TRANSPORTS, TRANSPORTS, transport

_AT_ONCE = 32 << 20
"""Bytes of one delivery: what the receiver must have room for, and what counts only as a whole."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection to one rank of the other side."""

    writer: Writer
    layout: LayoutDescription
    pieces: tuple[Piece, ...]
    straight: bool


class KVSender:
    """One rank's sending end, connected to the ranks of one other engine. Calls of `send` meanwhile wait."""

    def __init__(self, store: KVMemory, addresses: Sequence[dict[str, Any]], secret: bytes, *, rank: int = 0,
                 layouts: Sequence[LayoutDescription] | None = None,
                 transports: Sequence[str] = DEFAULT_TRANSPORTS, timeout: float = 10.0, convert: bool = False,
                 host: str | None = None) -> None:
        """`addresses`: of every rank of the other side, as `KVReceiver.address` made them. `layouts`: of every rank of
        this side, where there are several. `host`: where the other side is, if it listens on all interfaces. Raises
        KVMismatchError where KV of this side cannot be understood there, PeerLostError if there is no answer."""
        self._store = store
        self.timeout = timeout
        """Seconds for each delivery."""
        self._layouts = [store.layout] if layouts is None else list(layouts)
        self._hello = json.dumps({"rank": rank, "layouts": [each.to_data() for each in self._layouts]}).encode()
        self._host = host
        self._links: list[_Link] = []
        self._one_at_a_time = Lock()
        try:
            for address in addresses:
                self._connect(address, secret, rank, transports, convert)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: dict[str, Any], secret: bytes, rank: int, names: Sequence[str], convert: bool) -> None:
        theirs = LayoutDescription.from_data(address.get("layout"))
        check_compatible(self._store.layout, theirs, convert)
        pieces = shares(self._layouts, theirs)[rank]
        if not pieces:
            return
        straight = written_straight(self._store.layout, theirs, pieces)
        writer = self._reach(address.get("transports"), secret, names)
        self._links.append(_Link(writer, theirs, pieces, straight))

    def _reach(self, offered: object, secret: bytes, names: Sequence[str]) -> Writer:
        """By the first transport that both sides have and that gets through."""
        problems: list[str] = []
        if not isinstance(offered, dict):
            raise KVTransferError("the address of a KV receiver names no transports")
        for name in sorted(names, key=TRANSPORTS.index):
            if name not in offered:
                continue
            there = transport(name)
            missing = there.missing()
            if missing is not None:
                problems.append(f"{name}: {missing}")
                continue
            try:
                return there.connect(self._placed(offered[name]), secret, self._hello, self.timeout)
            except KVMismatchError:
                raise
            except KVTransferError as error:
                problems.append(f"{name}: {error}")
        raise PeerLostError(f"the KV receiver cannot be reached ({'; '.join(problems) or 'no transport in common'})")

    @property
    def writers(self) -> list[Writer]:
        """The connections, one for each rank of the other side that gets something."""
        return [link.writer for link in self._links]

    def _placed(self, address: object) -> Address:
        """All interfaces is no place to go to."""
        if not isinstance(address, dict):
            raise KVTransferError("the address of a KV receiver is none")
        if address.get("host") not in ALL_INTERFACES:
            return address
        if self._host is None:
            raise KVTransferError("the KV receiver listens on all interfaces and it is not known where it is")
        return {**address, "host": self._host}

    def send(self, ticket: Ticket, tables: Tables, start: int, end: int) -> int:
        """Write the KV of tokens start … end-1, which lie in the blocks `tables`, and wait until it counts there; how
        many bytes that were.

        Ranges may come in any order and overlap. Raises StaleTransferError if the transfer was closed, PeerLostError
        if the other side does not answer (this sender is of no use then), KVTransferError if it refuses.
        """
        starts, there = _read_ticket(ticket)
        with self._one_at_a_time:
            return self._send(ticket, tables, there, starts, start, end)

    def _send(self, ticket: Ticket, tables: Tables, there: Tables, starts: tuple[int, ...], start: int,
              end: int) -> int:
        sent = 0
        for link in self._links:
            for first, last, whole in self._cut(link, start, end):
                if whole:
                    sent += self._send_straight(link, ticket, tables, there, Span(first, last, starts))
                    continue
                limit = min(_AT_ONCE, link.writer.most_bytes)
                for span in spans(first, last, starts, link.pieces, self._store.layout.element_size, limit,
                                  link.layout.block_size):
                    payload = link.writer.buffer(span.nbytes(link.pieces, self._store.layout.element_size))
                    self._store.gather(tables, span, link.pieces, payload)
                    sent += self._deliver(link, ticket, Note(span.start, span.end, True), payload=payload)
        return sent

    def _cut(self, link: _Link, start: int, end: int) -> list[tuple[int, int, bool]]:
        """Whole blocks of equal layouts are written straight; a block that is filled in part travels by token."""
        size = self._store.layout.block_size
        first, last = -(-start // size) * size, end // size * size
        if not link.straight or first >= last:
            return [(start, end, False)]
        cut = [(start, first, False), (first, last, True), (last, end, False)]
        return [each for each in cut if each[0] < each[1]]

    def _send_straight(self, link: _Link, ticket: Ticket, tables: Tables, there: Tables, span: Span) -> int:
        layout = self._store.layout
        size = layout.block_size
        biggest = max(layout.block_bytes(part) for _, part in layout.tensors()) * len(link.pieces)
        blocks = max(1, min(_AT_ONCE, link.writer.most_bytes) // biggest)
        sent = 0
        for at in range(span.start, span.end, blocks * size):
            piece = Span(at, min(span.end, at + blocks * size), span.starts)
            sent += self._deliver(link, ticket, Note(piece.start, piece.end, False),
                                  writes=self._writes(link, tables, there, piece))
        return sent

    def _writes(self, link: _Link, tables: Tables, there: Tables, span: Span) -> list[Write]:
        """One for each run of neighbouring blocks and tensor."""
        size = self._store.layout.block_size
        regions = {(layer.layer, part.name): index for index, (layer, part) in enumerate(link.layout.tensors())}
        runs = {}
        for group in {piece.group for piece in link.pieces}:
            start, end = span.of_group(group)
            which = slice(start // size, end // size if start < end else start // size)
            sources, targets = tables[group][which], there[group][which]
            if len(sources) != len(targets) or any(block < 0 for block in (*sources, *targets)):
                raise KVTransferError(f"tokens {start} to {end} have no blocks on both sides")
            runs[group] = merged_runs(sources, targets)
        writes = []
        for index, (layer, part) in enumerate(self._store.layout.tensors()):
            region = regions.get((layer.layer, part.name))
            if region is None:
                continue
            bytes_, source = self._store.layout.block_bytes(part), self._store.bytes_of(index)
            for run in runs[layer.group]:
                data = source[run.source * bytes_ : (run.source + run.count) * bytes_]
                writes.append(Write(region, run.target * bytes_, data))
        return writes

    def _deliver(self, link: _Link, ticket: Ticket, note: Note, writes: Sequence[Write] = (),
                 payload: memoryview | None = None) -> int:
        delivery = Delivery(ticket["transfer"], ticket["epoch"], note.to_bytes(), writes, payload)
        link.writer.deliver(delivery, self.timeout)
        return delivery.nbytes

    def abort(self) -> None:
        """From any thread: a `send` that is under way fails at once, and this sender is of no use any more."""
        for link in self._links:
            link.writer.abort()

    def close(self) -> None:
        for link in self._links:
            link.writer.close()


def _read_ticket(ticket: Ticket) -> tuple[tuple[int, ...], list[list[int]]]:
    """The first token wanted of each group, and the other side's block tables."""
    starts, tables = ticket.get("starts"), ticket.get("tables")
    numbers = [ticket.get("transfer"), ticket.get("epoch"), ticket.get("end")]
    if isinstance(starts, list) and isinstance(tables, list) and len(starts) == len(tables):
        flat = [*numbers, *starts, *(block for table in tables if isinstance(table, list) for block in table)]
        if all(isinstance(each, int) and -1 <= each < 1 << 63 for each in flat):
            return tuple(starts), tables
    raise KVTransferError(f"{ticket!r:.80} is not the ticket of a KV transfer")
