"""What one layer keeps of a sequence's tokens, as plain data: which tensors, and how large each is. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import InvariantError

KVKind = Literal["pair", "latent", "feature"]
"""pair: keys and values by heads; latent: one vector for all heads (MLA); feature: a hidden state of the target, which
a draft head reads and nobody attends to. A state will be another kind."""

CODES_PER_WORD = 4
_PADDED_CODES = 16
"""Codes of a head fill whole vectors of every instruction set."""


@dataclass(frozen=True, slots=True)
class KVPart:
    """One tensor of a layer's cache: `heads` vectors of `width` elements for each token."""

    name: str
    heads: int
    width: int

    @property
    def elements_per_token(self) -> int:
        return self.heads * self.width


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps of each token. Sizes, copies and transfers of KV ask this and assume nothing."""

    kind: KVKind
    parts: tuple[KVPart, ...]
    window: int | None = None
    """How many tokens back it is read; None: all of them."""
    coded_dim: int | None = None
    """Width of the heads where they are kept as int8 codes: an element is a word of four codes, the last one a head's
    scale. None: elements are numbers."""

    @classmethod
    def pair(cls, num_kv_heads: int, head_dim: int, window: int | None = None) -> KVSpec:
        """A key and a value for each kv head."""
        return cls("pair", (KVPart("k", num_kv_heads, head_dim), KVPart("v", num_kv_heads, head_dim)), window)

    @classmethod
    def latent(cls, width: int) -> KVSpec:
        """One vector that all heads read: what keys and values are made of, and the keys' rotated part."""
        return cls("latent", (KVPart("latent", 1, width),))

    @classmethod
    def feature(cls, width: int) -> KVSpec:
        """One hidden state."""
        return cls("feature", (KVPart("feature", 1, width),))

    def in_codes(self) -> KVSpec:
        """The same keys and values as int8 codes, with a scale for each token and head (`cpu/code_cache.h`)."""
        _, dim = self.heads_of_pair()
        width = -(-dim // _PADDED_CODES) * (_PADDED_CODES // CODES_PER_WORD) + 1
        return replace(self, parts=tuple(replace(part, width=width) for part in self.parts), coded_dim=dim)

    @property
    def elements_per_token(self) -> int:
        return sum(part.elements_per_token for part in self.parts)

    def bytes_per_token(self, element_size: int = 4) -> int:
        return self.elements_per_token * element_size

    def bytes_per_block(self, block_size: int, element_size: int = 4) -> int:
        return self.bytes_per_token(element_size) * block_size

    def heads_of_pair(self) -> tuple[int, int]:
        """kv heads and their width, for backends that attend to pairs of k and v only."""
        if self.kind != "pair":
            raise InvariantError(f"this backend keeps pairs of k and v, not KV of kind {self.kind!r}")
        return self.parts[0].heads, self.coded_dim or self.parts[0].width
