"""One unit as bytes: a header with its name and a checksum over name and content. Anything else is a miss."""

from __future__ import annotations

import struct

import xxhash

from quire.errors import KVUnitError
from quire.kvpool.keys import KEY_BYTES, UNIT_VERSION

_MAGIC = b"QuireKVU"
_NAME_BYTES = KEY_BYTES + 2
_HEADER = struct.Struct(f"<8sI{_NAME_BYTES}s2xQ16s")
HEADER_BYTES = _HEADER.size


def seal(name: bytes, content: bytes | bytearray | memoryview, seed: int) -> bytes:
    """The header that goes in front of the content."""
    size = len(content)
    return _HEADER.pack(_MAGIC, UNIT_VERSION, name, size, _checksum(name, content, seed))


def check(name: bytes, unit: bytes | bytearray | memoryview, seed: int, size: int | None = None) -> memoryview:
    """The content of a sealed unit; KVUnitError if it is torn, changed, or not the one that was asked for.

    `size`: what the content must have; None: any.
    """
    view = memoryview(unit)
    if len(view) < HEADER_BYTES:
        raise KVUnitError(f"a KV unit is cut off after {len(view)} bytes")
    magic, version, held, length, checksum = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != UNIT_VERSION:
        raise KVUnitError("these bytes are no KV unit of this version")
    if held != name:
        raise KVUnitError("this is another KV unit than the one that was asked for")
    content = view[HEADER_BYTES:]
    if length != len(content) or (size is not None and length != size):
        raise KVUnitError(f"a KV unit has {len(content)} bytes instead of {length if size is None else size}")
    if checksum != _checksum(name, content, seed):
        raise KVUnitError("the content of a KV unit is not what was written")
    return content


def _checksum(name: bytes, content: bytes | bytearray | memoryview, seed: int) -> bytes:
    digest = xxhash.xxh3_128(seed=seed)
    digest.update(name + len(content).to_bytes(8, "little"))
    digest.update(content)
    return digest.digest()
