"""The secret that replicas share, and the keys that are derived from it, one for each purpose.

Engines that share a secret give equal prefixes equal names, so that a router, a pool or a peer can say which of them
holds what. Without it one can neither guess a prefix from its name nor make up a name.
"""

from __future__ import annotations

import hashlib


def derived_secret(secret: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose: knowing them tells nothing about the secret, nor about another purpose's."""
    # The first hash makes a key of any length fit; the second one depends on the purpose.
    key = hashlib.blake2b(secret, digest_size=64).digest()
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=32).digest()


def secret_name(secret: bytes) -> str:
    """A public fingerprint: equal for equal secrets, and the secret cannot be computed from it."""
    return derived_secret(secret, "name").hex()[:32]
