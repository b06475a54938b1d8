"""What an engine and its grammar processes send each other, and how much a grammar may take."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

PACKET_BYTES: Final = 1 << 18
QUERY: Final = struct.Struct("<cIIIII")
"""b"Q", or b"T" where no answer is wanted; serial, sequence, first place that is new, tokens, drafts; then those. One
or more in a packet."""
ANSWER: Final = struct.Struct("<cIIBI")
"""b"M", serial, place of the mask, flags, its bytes; then the mask. One or more in a packet."""
FULL_BYTES: Final = 1 << 16
"""What has as much is sent; a socket takes 200 KiB at once."""
ANSWER_SECONDS: Final = 0.001
"""An answer waits no longer than that, and one mask, for others that go with it."""
LAST: Final = 1
OVER: Final = 2
SPENT: Final = 4
"""The request has used up what all its tokens may take."""
SLOW: Final = 8
"""The process has computed for so long at one mask that it goes after all others from now on."""


@dataclass(frozen=True, slots=True)
class CellLimits:
    """What a grammar may take."""

    token_seconds: float = 0.25
    """Of computing, for the mask of one token."""
    request_seconds: float = 30.0
    """The same for all tokens of a request."""
    memory_bytes: int = 1 << 30
    compile_seconds: float = 30.0
    mask_quick_seconds: float = 0.005
    """What computes for longer at one mask, or at compiling, goes after the engine's own work."""
    compile_quick_seconds: float = 0.03
