"""What senders, receivers and the KV pool ask of an engine's KV, wherever its tensors are. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.kvtransfer.layout import LayoutDescription, Piece, Span

Tables = Sequence[Sequence[int]]
"""By cache group: a sequence's blocks, in order; -1 for those it does not have any more."""


class KVMemory(Protocol):
    """KV in blocks, gathered into the wire form and scattered out of it: the tensors of one process (`KVStore`), or
    those of all ranks of an engine (`ranks/shared_kv.py`).

    Content is the caller's to protect: nobody else may write what is gathered here, and nobody may read what is
    scattered here until the call returns.
    """

    @property
    def layout(self) -> LayoutDescription: ...

    def gather(self, tables: Tables, span: Span, pieces: Sequence[Piece], out: memoryview) -> int:
        """The wire form of a span, written to the beginning of `out`; how many bytes."""
        ...

    def scatter(self, tables: Tables, span: Span, pieces: Sequence[Piece], data: memoryview,
                dtype: str | None = None, scale: float = 1.0) -> None:
        """Put a span that came in the wire form into its blocks; nothing else of them is touched.

        `dtype` and `scale` are those of the sender's cache; other ones than here are converted.
        """
        ...

    def bytes_of(self, region: int) -> memoryview:
        """A tensor as the bytes that it is, by its number in the layout, where the layout is `addressable`."""
        ...
