"""What this room asks of those who move KV between engines; `kvtransfer` does it for tensors, `fuzz` for numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Data = dict[str, Any]
Tables = Sequence[Sequence[int]]
"""By cache group: a sequence's blocks, in order; -1 for those that a window has passed."""
Arrived = Callable[[int, int], None]
"""Called from any thread: tokens start … end-1 are in their blocks."""


class KVSends(Protocol):
    """Writes KV of this engine into blocks of one other."""

    def send(self, ticket: Data, tables: Tables, start: int, end: int) -> int:
        """Returns when tokens start … end-1 are written over there, with their bytes; raises KVTransferError."""
        ...

    def abort(self) -> None:
        """From another thread: what is being sent fails within a moment, and so does whatever follows."""
        ...

    def close(self) -> None: ...


class KVMover(Protocol):
    """Both halves for one engine."""

    def describe(self) -> Data:
        """For the other side's handshake: what model this is, how its KV lies, how it can be reached."""
        ...

    def check(self, theirs: Data, receives: bool) -> None:
        """Raises KVMismatchError, by name, unless KV can come from there (`receives`) or go there."""
        ...

    def open(self, transfer: int, theirs: Data, tables: Tables, starts: Sequence[int], end: int, arrived: Arrived,
             failed: Callable[[str], None]) -> Data:
        """Let another engine write into these blocks; the ticket that it needs for that."""
        ...

    def shut(self, transfer: int) -> None:
        """When it returns, nothing of that transfer is written any more, whatever still comes."""
        ...

    def sender(self, theirs: Data) -> KVSends: ...

    def close(self) -> None: ...
