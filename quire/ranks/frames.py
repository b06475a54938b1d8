"""Messages over a socket between an engine and one of its ranks: a kind, a length, and bytes."""

from __future__ import annotations

import enum
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from quire.errors import EngineError

_HEAD = struct.Struct("<BI")
_RECEIVED_AT_ONCE = 1 << 16
MOST_BYTES = 1 << 30
"""Longest message; a header that announces more is not of this protocol."""


class Kind(enum.IntEnum):
    """What a message is; who sends it, and what it holds."""

    START = 1
    """To a rank, JSON: what it is to run (`RankStart`)."""
    SIZED = 2
    """From a rank, JSON: the KV pool that it could hold."""
    AGREED = 3
    """To a rank, JSON: the KV pool of all."""
    READY = 4
    """From a rank: it waits for plans."""
    FAILED = 5
    """From a rank, JSON: why it could not start."""
    PLAN = 6
    """To a rank that shares no memory with the engine: a plan."""
    RESULT = 7
    """From the rank that draws: the result of the next step."""
    REPORTS = 8
    """From a rank: reports of its transfers."""
    STEP_FAILED = 9
    """From a rank, JSON: a step raised an error."""
    PULSE = 10
    """From a rank, JSON: it lives, and what it has done."""
    MAKE = 11
    """To a rank, JSON: make memory that it shares with other ranks of its machine."""
    MADE = 12
    """From a rank, JSON: where that memory is."""
    KV_JOB = 13
    """To a rank, JSON: copy KV between its blocks and memory that it shares with the engine (`rank_kv.py`)."""
    KV_DONE = 14
    """From a rank, JSON: what came of that."""


Frame = tuple[Kind, bytes]


class Seal(Protocol):
    """Marks messages of those who know a secret, one after the other in each direction."""

    tag_bytes: int

    def tag(self, head: bytes, payload: bytes) -> bytes: ...

    def check(self, head: bytes, payload: bytes, tag: bytes) -> bool: ...


class ConnectionLost(EngineError):
    """The other side has closed the connection, or it broke."""


class FrameBuffer:
    """Puts messages together from pieces as they arrive."""

    def __init__(self, seal: Seal | None = None) -> None:
        self._data = bytearray()
        self._seal = seal

    def feed(self, data: bytes) -> list[Frame]:
        """The messages that are complete now. Those without the right seal break the connection."""
        self._data += data
        found: list[Frame] = []
        extra = 0 if self._seal is None else self._seal.tag_bytes
        while len(self._data) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._data)
            end = _HEAD.size + size + extra
            if size > MOST_BYTES:
                raise ConnectionLost(f"a message of {size} bytes was announced")
            if len(self._data) < end:
                break
            head, payload = bytes(self._data[: _HEAD.size]), bytes(self._data[_HEAD.size : _HEAD.size + size])
            if self._seal is not None and not self._seal.check(head, payload, bytes(self._data[end - extra : end])):
                raise ConnectionLost("a message without the right seal arrived")
            del self._data[:end]
            try:
                found.append((Kind(kind), payload))
            except ValueError:
                raise ConnectionLost(f"a message of unknown kind {kind} arrived") from None
        return found


class FrameSocket:
    """A socket that carries messages. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket, sending: Seal | None = None, receiving: Seal | None = None) -> None:
        self._socket = sock
        self._sending = sending
        self._buffer = FrameBuffer(receiving)
        self._ready: list[Frame] = []
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, payload: bytes | bytearray = b"") -> None:
        head = _HEAD.pack(kind, len(payload))
        with self._lock:
            parts = [head, payload]
            if self._sending is not None:
                parts.append(self._sending.tag(head, bytes(payload)))
            try:
                self._socket.sendall(b"".join(parts))
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from None

    def tell(self, kind: Kind, content: Mapping[str, Any]) -> None:
        self.send(kind, json.dumps(content).encode())

    def receive(self, seconds: float = math.inf) -> Frame:
        """The next message; waits for it, but no longer than that (where the socket has a timeout)."""
        until = time.monotonic() + seconds
        while not self._ready:
            self._ready = self.take()
            if not self._ready and time.monotonic() > until:
                raise ConnectionLost(f"no answer came within {seconds:.0f} seconds")
        return self._ready.pop(0)

    def take(self) -> list[Frame]:
        """The messages that the next bytes complete, perhaps none. Waits for bytes, but no longer than the socket's
        timeout."""
        try:
            data = self._socket.recv(_RECEIVED_AT_ONCE)
        except TimeoutError:
            return []
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from None
        if not data:
            raise ConnectionLost("the connection was closed")
        return self._buffer.feed(data)

    def cut(self) -> None:
        """End the connection: both sides learn of it, also where a thread waits in `receive`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Let go of the socket, on the thread that watches it. Idempotent."""
        self.cut()
        self._socket.close()
