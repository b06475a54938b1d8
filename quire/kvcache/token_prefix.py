"""The tokens behind a question to a tier: for tiers that name KV by tokens, not by the engine's own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenPrefix:
    """The first tokens of a sequence. Equal tokens under another `root` are another prefix (salt, adapter, tenant)."""

    root: bytes
    tokens: Sequence[int]
    num_tokens: int
    """So many of `tokens` are meant."""
    unit_keys: list[bytes] = field(default_factory=list)
    """Keys of its pool units that were computed so far; the sequence keeps them."""


@dataclass(slots=True)
class BlockRange:
    """Neighbouring blocks of one sequence and one group that a tier wants to copy: all of them, or none."""

    group: int
    first: int
    """Entry of the sequence's block table."""
    places: list[int]
    """Where each goes in the tier."""
