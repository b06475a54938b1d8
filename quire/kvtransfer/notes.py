"""What a delivery of KV says about itself: which tokens, and in which form."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from quire.errors import KVTransferError

_NOTE = struct.Struct("<QQ?")


@dataclass(frozen=True, slots=True)
class Note:
    start: int
    end: int
    wire: bool
    """The payload is the wire form of these tokens; if not, their blocks were written straight."""

    def to_bytes(self) -> bytes:
        return _NOTE.pack(self.start, self.end, self.wire)

    @classmethod
    def from_bytes(cls, data: bytes) -> Note:
        if len(data) != _NOTE.size:
            raise KVTransferError("a delivery of KV that does not say which tokens it is")
        return cls(*_NOTE.unpack(data))
