"""Names of the pool's units: a keyed hash chain over 256 tokens each, the same for every engine that may share them."""

from __future__ import annotations

import hashlib
from array import array

from quire.kvcache.secret import derived_secret
from quire.kvcache.token_prefix import TokenPrefix

UNIT_TOKENS = 256
"""Tokens of a unit, whatever the block size of the engine that wrote it."""
UNIT_VERSION = 1
"""Of names and of content, and of the bits that kernels compute: raised when any of these changes. Units of another
version have other names, so they are not found."""
KEY_BYTES = 32


class UnitKeys:
    """Hashes unit i from its tokens and the key of unit i-1. The chain's root is the fingerprint of the KV.

    Keyed BLAKE2b: who does not have the secret can neither tell from a name what the tokens are, nor ask a pool
    whether it holds a prompt that he guesses.
    """

    def __init__(self, secret: bytes, fingerprint: bytes, unit_tokens: int = UNIT_TOKENS) -> None:
        """`fingerprint` names all that the numbers depend on besides the tokens: weights, dtype, layout. Other units
        than of 256 tokens are for tests."""
        self.unit_tokens = unit_tokens
        self._secret = derived_secret(secret, "pool")
        self.check_seed = int.from_bytes(derived_secret(secret, "pool-check")[:8], "little")
        """Seeds the checksum of units: content that was written under another secret does not pass."""
        self._fingerprint = fingerprint

    def extend(self, prefix: TokenPrefix) -> list[bytes]:
        """The keys of the whole units of a prefix; computes what `prefix.unit_keys` lacks, and may return more."""
        keys, size = prefix.unit_keys, self.unit_tokens
        whole = prefix.num_tokens // size
        if len(keys) < whole:
            parent = keys[-1] if keys else self._root(prefix.root)
            for i in range(len(keys), whole):
                content = array("q", prefix.tokens[i * size : (i + 1) * size]).tobytes()
                parent = hashlib.blake2b(parent + content, digest_size=KEY_BYTES, key=self._secret).digest()
                keys.append(parent)
        return keys

    def _root(self, root: bytes) -> bytes:
        start = hashlib.blake2b(digest_size=KEY_BYTES, key=self._secret)
        size = self.unit_tokens.to_bytes(4, "little")
        for part in (UNIT_VERSION.to_bytes(4, "little"), size, self._fingerprint, root):
            start.update(len(part).to_bytes(8, "little") + part)
        return start.digest()


def unit_name(key: bytes, group: int) -> bytes:
    """The part of a unit that belongs to one cache group is stored by itself: windows need few of them."""
    return key + group.to_bytes(2, "little")
