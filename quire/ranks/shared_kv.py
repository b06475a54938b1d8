"""The KV of all ranks of an engine as one memory: whoever sends, receives or keeps KV need not know of ranks.

Each rank gathers its layers and heads into memory that it shares with the engine, which puts the wire form of all
together. The other way round the engine cuts the wire form into what each rank holds, and the call returns when every
rank has its part.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.errors import EngineDeadError, KVTransferError, QuireError
from quire.kvtransfer.layout import (
    ELEMENT_SIZES,
    LayerLayout,
    LayoutDescription,
    PartLayout,
    Piece,
    Span,
    shares,
    spans,
)
from quire.kvtransfer.memory import Tables
from quire.ranks.rank_kv import ATTACH, DESCRIBE, GATHER, SCATTER, Job
from quire.ranks.shared_memory import SharedMemory

_SLOT_BYTES = 4 << 20
"""That a rank copies at once: how long a call keeps others waiting."""
_MOST_REMEMBERED = 64

Bytes = NDArray[np.uint8]
Dealt = list[list[tuple[int, Piece]]]
"""By rank: the number of a piece, and which heads of it are the rank's."""


class KVRanks(Protocol):
    """What this needs of the ranks (`RankExecutor`)."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def steps_over(self) -> int:
        """Plans whose results have come."""

    @property
    def failure(self) -> EngineDeadError | None: ...

    def tell_kv(self, rank: int, job: Job) -> None: ...


@dataclass(slots=True)
class _Call:
    """A question to some ranks."""

    open: set[int]
    """Who has not answered."""
    answers: dict[int, Job] = field(default_factory=dict)
    error: str | None = None
    over: threading.Event = field(default_factory=threading.Event)


class SharedKV:
    """A `KVMemory`. One call at a time in each direction; others wait."""

    def __init__(self, ranks: KVRanks, connect: Callable[[SharedKV], None]) -> None:
        """`connect`: have the ranks' answers brought to `answered`, and their end to `lost`."""
        self._ranks = ranks
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        """Of the calls."""
        connect(self)
        everybody = range(ranks.num_ranks)
        told = self._ask({rank: {"do": DESCRIBE} for rank in everybody})
        self._layouts = [LayoutDescription.from_data(told[rank]["layout"]) for rank in everybody]
        self.layout = joined_layout(self._layouts)
        self._dealt: dict[tuple[bool, tuple[Piece, ...]], Dealt] = {}
        self._one_at_a_time = {GATHER: threading.Lock(), SCATTER: threading.Lock()}
        widest = max(ELEMENT_SIZES.values())
        self._slot = max(_SLOT_BYTES, *(sum(piece.nbytes(1, widest) for piece in each.pieces())
                                        for each in self._layouts))
        self._memory = SharedMemory.create("kv", 2 * self._slot * ranks.num_ranks)
        self._bytes = np.frombuffer(self._memory.map, np.uint8)
        self._ask({rank: {"do": ATTACH, "memory": [os.getpid(), self._memory.fd],
                          "slots": {what: [self._first(what, rank), self._slot] for what in (GATHER, SCATTER)}}
                   for rank in everybody})
        self._memory.close()  # everybody has mapped it

    def _first(self, what: str, rank: int) -> int:
        return (2 * rank + (what == SCATTER)) * self._slot

    # ---- as a memory

    def gather(self, tables: Tables, span: Span, pieces: Sequence[Piece], out: memoryview) -> int:
        size = self.layout.element_size
        nbytes = span.nbytes(pieces, size)
        if out.nbytes < nbytes:
            raise KVTransferError(f"{nbytes} bytes of KV do not fit in {out.nbytes}")
        if nbytes == 0:
            return 0
        wire, dealt = np.frombuffer(out, np.uint8)[:nbytes], self._deal(pieces, everyone=False)
        with self._one_at_a_time[GATHER]:
            for part in self._cut(span, dealt, size):
                self._ask({rank: self._job(GATHER, tables, part, mine) for rank, mine in enumerate(dealt) if mine})
                for slots, theirs in self._pairs(GATHER, span, part, pieces, dealt, wire, size):
                    theirs[:] = slots
        return nbytes

    def scatter(self, tables: Tables, span: Span, pieces: Sequence[Piece], data: memoryview,
                dtype: str | None = None, scale: float = 1.0) -> None:
        name = dtype or self.layout.dtype
        size = ELEMENT_SIZES[name]
        nbytes = span.nbytes(pieces, size)
        if len(data) != nbytes:
            raise KVTransferError(f"{len(data)} bytes of KV came where {nbytes} belong")
        if nbytes == 0:
            return
        wire, dealt = np.frombuffer(data, np.uint8), self._deal(pieces, everyone=True)
        with self._one_at_a_time[SCATTER]:
            for part in self._cut(span, dealt, size):
                for slots, theirs in self._pairs(SCATTER, span, part, pieces, dealt, wire, size):
                    slots[:] = theirs
                self._ask({rank: {**self._job(SCATTER, tables, part, mine), "dtype": name, "scale": scale,
                                  "bytes": part.nbytes([piece for _, piece in mine], size)}
                           for rank, mine in enumerate(dealt) if mine})

    def bytes_of(self, region: int) -> memoryview:
        raise KVTransferError("the blocks of an engine of several ranks are not in its own process")

    # ---- who has what

    def _deal(self, pieces: Sequence[Piece], everyone: bool) -> Dealt:
        """Which heads each rank copies. A head that several ranks hold comes from the first of them, and goes to
        `everyone`."""
        key = (everyone, tuple(pieces))
        if key not in self._dealt:
            if len(self._dealt) >= _MOST_REMEMBERED:
                self._dealt.clear()
            self._dealt[key] = dealt_pieces(self._layouts, pieces, everyone)
        return self._dealt[key]

    def _cut(self, span: Span, dealt: Dealt, size: int) -> list[Span]:
        """Parts of a span that fit into the slot of the rank that has most of it."""
        largest = max(([piece for _, piece in mine] for mine in dealt),
                      key=lambda mine: sum(piece.nbytes(1, size) for piece in mine))
        return spans(span.start, span.end, span.starts, largest, size, self._slot)

    def _job(self, what: str, tables: Tables, span: Span, mine: list[tuple[int, Piece]]) -> Job:
        pieces = [[piece.layer, piece.group, piece.part, piece.width, piece.first_head, piece.num_heads]
                  for _, piece in mine]
        # Of the tables only the blocks of these tokens are sent: a long prompt has thousands of them.
        size = self.layout.block_size
        first, last = span.start // size, -(-span.end // size)
        base = first * size
        return {"do": what, "after": self._ranks.steps_over, "tables": [list(table[first:last]) for table in tables],
                "span": [span.start - base, span.end - base, [max(0, start - base) for start in span.starts]],
                "pieces": pieces}

    def _pairs(self, what: str, span: Span, part: Span, pieces: Sequence[Piece], dealt: Dealt, wire: Bytes,
               size: int) -> Iterator[tuple[Bytes, Bytes]]:
        """For each piece of each rank: its place in the rank's slot, and in the wire form of the whole span."""
        whole, at = [], 0
        for piece in pieces:
            start, end = span.of_group(piece.group)
            nbytes = piece.nbytes(end - start, size)
            whole.append(wire[at : at + nbytes].reshape(end - start, piece.num_heads * piece.width * size))
            at += nbytes
        for rank, mine in enumerate(dealt):
            at = self._first(what, rank)
            for number, held in mine:
                piece, (start, end) = pieces[number], part.of_group(held.group)
                if start == end:
                    continue
                nbytes, row = held.nbytes(end - start, size), held.width * size
                first, column = span.of_group(held.group)[0], (held.first_head - piece.first_head) * row
                yield (self._bytes[at : at + nbytes].reshape(end - start, held.num_heads * row),
                       whole[number][start - first : end - first, column : column + held.num_heads * row])
                at += nbytes

    # ---- questions and answers

    def _ask(self, jobs: dict[int, Job]) -> dict[int, Job]:
        """Have ranks do something, and wait until all of them have; raises what the first that failed said."""
        number, call = next(self._numbers), _Call(set(jobs))
        with self._lock:
            self._calls[number] = call
        try:
            for rank, job in jobs.items():
                self._ranks.tell_kv(rank, {"job": number, **job})
            failure = self._ranks.failure
            if failure is not None:  # perhaps it came before this call was known
                raise failure
            call.over.wait()
        except QuireError as error:
            raise KVTransferError(str(error)) from error
        finally:
            with self._lock:
                del self._calls[number]
        if call.error is not None:
            raise KVTransferError(call.error)
        return call.answers

    def answered(self, rank: int, told: dict[str, Any]) -> None:
        """From the thread that listens to the ranks."""
        with self._lock:
            call = self._calls.get(told["job"])
            if call is None or rank not in call.open:
                return
            call.open.discard(rank)
            call.answers[rank] = told
            if call.error is None:
                call.error = told.get("error")
            if not call.open:
                call.over.set()

    def lost(self, why: str) -> None:
        """No rank will answer any more."""
        with self._lock:
            for call in self._calls.values():
                call.error = why
                call.over.set()


def joined_layout(layouts: Sequence[LayoutDescription]) -> LayoutDescription:
    """The KV of all ranks, as if one had it. Only the ranks can reach into its blocks."""
    found: dict[int, LayerLayout] = {}
    for each in layouts:
        for layer in each.layers:
            found[layer.layer] = replace(layer, parts=tuple(
                replace(part, first_head=0, num_heads=part.heads, tokens_last=False) for part in layer.parts))
    whole = replace(layouts[0], num_blocks=min(each.num_blocks for each in layouts), addressable=False,
                    layers=tuple(found[number] for number in sorted(found)))
    shares(layouts, whole)  # raises where a head is on no rank
    return whole


def dealt_pieces(layouts: Sequence[LayoutDescription], pieces: Sequence[Piece], everyone: bool) -> Dealt:
    """By rank: its heads of each piece; each head once, or once for everyone who holds it."""
    tables: list[dict[tuple[int, str], PartLayout]] = [
        {(layer.layer, part.name): part for layer, part in layout.tensors()} for layout in layouts]
    dealt: Dealt = [[] for _ in layouts]
    for number, piece in enumerate(pieces):
        end = piece.first_head + piece.num_heads
        taken = piece.first_head
        for rank, table in enumerate(tables):
            held = table.get((piece.layer, piece.part))
            if held is None:
                continue
            first = max(held.first_head, piece.first_head if everyone else taken)
            last = min(held.first_head + held.num_heads, end)
            if first < last:
                dealt[rank].append((number, replace(piece, first_head=first, num_heads=last - first)))
                taken = max(taken, last)
        if taken < end:
            raise KVTransferError(f"no rank has head {taken} of {piece.part} in layer {piece.layer}")
    return dealt
