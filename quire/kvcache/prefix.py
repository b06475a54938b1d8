"""Names for prefixes: a chain of keyed hashes over full blocks of tokens."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from struct import pack

from quire.kvcache.table import SequenceKV

_DIGEST_BYTES = 16
_BLOCKS_AT_ONCE = 64
"""Blocks converted to bytes at once, so that a caller who needs only the first names does not pay for all."""


class HashChain:
    """Hashes block i from its tokens and the hash of block i-1, so equal hashes mean equal prefixes.

    BLAKE2b with a secret key drawn per engine: 128 bits rule out accidental collisions, and the key prevents
    anyone outside from constructing one.
    """

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self.block_size = block_size
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def extend(self, kv: SequenceKV, tokens: list[int], num_tokens: int) -> list[bytes]:
        """The chain over at least the full blocks of `tokens[:num_tokens]`, hashing only what is new.

        Returns the sequence's own list, which may be longer if more tokens were hashed before.
        """
        size = self.block_size
        hashes = kv.hashes
        full = num_tokens // size
        if len(hashes) < full:
            first = len(hashes)
            hashes.extend(self._names(hashes[-1] if hashes else kv.key, tokens[first * size : full * size]))
        return hashes

    def names(self, key: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        """The names of the full blocks of `tokens`, one by one; `key` is the root of the chain (`cache_key`)."""
        return self._names(key, tokens[: len(tokens) // self.block_size * self.block_size])

    def _names(self, parent: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        size = self.block_size
        keyed = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._secret)
        for first in range(0, len(tokens), _BLOCKS_AT_ONCE * size):
            part = tokens[first : first + _BLOCKS_AT_ONCE * size]
            content = pack(f"{len(part)}q", *part)  # a third of the time of an array
            for start in range(0, len(content), 8 * size):
                digest = keyed.copy()
                digest.update(parent + content[start : start + 8 * size])
                parent = digest.digest()
                yield parent


def cache_key(parts: Iterable[str]) -> bytes:
    """Root of a chain, made from parts such as a salt; lengths are hashed too, so that `ab, c` is not `a, bc`."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    empty = True
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
        empty = False
    return b"" if empty else digest.digest()
