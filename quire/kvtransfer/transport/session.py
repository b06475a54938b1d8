"""A conversation over a stream socket between two processes that share a secret: handshake, then sealed frames.

Each side proves that it knows the secret without sending it. Every frame carries its number and a keyed hash, so one
that is cut, changed, repeated or from another sender is refused, and so ends the conversation.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import KVMismatchError, KVTransferError
from quire.kvtransfer.transport.base import Delivery, PeerLostError, StaleTransferError

PROTOCOL = b"QKV1"
_NONCE = 32
_HEADER = struct.Struct("<4sBxxxIQ")
"""Magic, kind, bytes of the body, number of the frame; then the seal, then the body."""
_SEAL = 16
MOST_BODY = 16 << 20
_MOST_BUFFERS = 512
"""In one call of sendmsg; the system's limit is 1024."""

HELLO, WELCOME, DELIVER, DIGEST, DONE, REFUSED = range(1, 7)


class FrameError(PeerLostError):
    """What came is not a frame of this conversation: it is over."""


class Session:
    """One side of an authenticated conversation; used by one thread at a time, except `cut`."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self.socket = sock
        self._keys = (send_key, receive_key)
        self._sent = self._received = 0

    def send(self, kind: int, body: bytes, deadline: float | None = None, data: Sequence[memoryview] = ()) -> None:
        """A frame, and data right behind it that belongs to no frame."""
        if len(body) > MOST_BODY:
            raise KVTransferError(f"a frame of {len(body)} bytes is too long: the most is {MOST_BODY}")
        head = _HEADER.pack(PROTOCOL, kind, len(body), self._sent)
        self._sent += 1
        sealed = memoryview(head + _seal(self._keys[0], head, body) + body)
        send_all(self.socket, [sealed, *data], deadline)

    def receive(self, deadline: float | None = None) -> tuple[int, bytes]:
        """The next frame. PeerLostError at its end or at the deadline, FrameError for anything that is not a frame."""
        head = receive_exactly(self.socket, _HEADER.size + _SEAL, deadline)
        magic, kind, length, number = _HEADER.unpack_from(head)
        if magic != PROTOCOL or length > MOST_BODY or number != self._received:
            raise FrameError("the other side of a KV transfer sent something that is not a frame")
        body = receive_exactly(self.socket, length, deadline)
        if not hmac.compare_digest(_seal(self._keys[1], head[: _HEADER.size], body), head[_HEADER.size :]):
            raise FrameError("a frame of a KV transfer was changed on its way")
        self._received += 1
        return kind, body

    def cut(self) -> None:
        """From any thread: calls that send or receive end at once."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        self.cut()
        self.socket.close()


def _seal(key: bytes, head: bytes, body: bytes) -> bytes:
    return hashlib.blake2s(head + body, key=key, digest_size=_SEAL).digest()


# ---- the handshake


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"quire kv " + side + nonces, "sha256")


def accept_session(sock: socket.socket, secret: bytes, deadline: float) -> Session:
    """The receiver's side."""
    theirs = receive_exactly(sock, len(PROTOCOL) + _NONCE, deadline)
    if theirs[: len(PROTOCOL)] != PROTOCOL:
        raise FrameError(f"the other side does not speak {PROTOCOL.decode()}")
    mine = secrets.token_bytes(_NONCE)
    nonces = theirs[len(PROTOCOL) :] + mine
    send_all(sock, [memoryview(PROTOCOL + mine + _proof(secret, b"receiver", nonces))], deadline)
    if not hmac.compare_digest(receive_exactly(sock, 32, deadline), _proof(secret, b"writer", nonces)):
        raise FrameError("the other side does not know the secret")
    return Session(sock, _proof(secret, b"down", nonces), _proof(secret, b"up", nonces))


def open_session(sock: socket.socket, secret: bytes, deadline: float) -> Session:
    """The writer's side."""
    mine = secrets.token_bytes(_NONCE)
    send_all(sock, [memoryview(PROTOCOL + mine)], deadline)
    answer = receive_exactly(sock, len(PROTOCOL) + _NONCE + 32, deadline)
    if answer[: len(PROTOCOL)] != PROTOCOL:
        raise FrameError(f"the other side does not speak {PROTOCOL.decode()}")
    nonces = mine + answer[len(PROTOCOL) : len(PROTOCOL) + _NONCE]
    if not hmac.compare_digest(answer[-32:], _proof(secret, b"receiver", nonces)):
        raise FrameError("the other side does not know the secret")
    send_all(sock, [memoryview(_proof(secret, b"writer", nonces))], deadline)
    return Session(sock, _proof(secret, b"up", nonces), _proof(secret, b"down", nonces))


# ---- bytes


def send_all(sock: socket.socket, buffers: Sequence[memoryview], deadline: float | None) -> None:
    """All of them, in as few system calls as there can be."""
    left = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    first = 0
    while first < len(left):
        _wait(sock, select.POLLOUT, deadline)
        try:
            count = sock.sendmsg(left[first : first + _MOST_BUFFERS], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            continue
        except OSError as error:
            raise PeerLostError(f"the other side of a KV transfer is gone ({error})") from error
        while first < len(left) and count >= left[first].nbytes:
            count -= left[first].nbytes
            first += 1
        if count:
            left[first] = left[first][count:]


def receive_some(sock: socket.socket, into: Sequence[memoryview]) -> int:
    """What has come already, without waiting, one buffer after the other; 0 if nothing. PeerLostError at the end of
    the stream."""
    try:
        count = sock.recvmsg_into(into, 0, socket.MSG_DONTWAIT)[0]
    except BlockingIOError:
        return 0
    except OSError as error:
        raise PeerLostError(f"the other side of a KV transfer is gone ({error})") from error
    if count == 0:
        raise PeerLostError("the other side of a KV transfer has hung up")
    return count


def receive_exactly(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view.nbytes:
        wait_readable(sock, deadline)
        view = view[receive_some(sock, [view]) :]
    return bytes(data)


def wait_readable(sock: socket.socket, deadline: float | None) -> None:
    _wait(sock, select.POLLIN, deadline)


def _wait(sock: socket.socket, events: int, deadline: float | None) -> None:
    try:
        poll = select.poll()
        poll.register(sock, events)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(left):
            raise PeerLostError("the other side of a KV transfer did not answer in time")
    except (OSError, ValueError) as error:  # closed by another thread
        raise PeerLostError(f"the connection was closed ({error})") from error


# ---- what is said


_REFUSAL = struct.Struct("<B")
_STALE, _MISMATCH, _OTHER = range(3)


def refusal(error: Exception) -> bytes:
    """An error as the body of a REFUSED frame."""
    if isinstance(error, StaleTransferError):
        return _REFUSAL.pack(_STALE) + b"\0" + str(error).encode()
    if isinstance(error, KVMismatchError):
        return _REFUSAL.pack(_MISMATCH) + error.field.encode() + b"\0" + str(error).encode()
    text = str(error) if isinstance(error, KVTransferError) else f"{type(error).__name__}: {error}"
    return _REFUSAL.pack(_OTHER) + b"\0" + text.encode()[:4096]


def refused(body: bytes) -> KVTransferError:
    """The error that a REFUSED frame stands for."""
    kind, _, rest = body[:1], b"", body[1:]
    field, _, text = rest.partition(b"\0")
    message = text.decode(errors="replace")
    if kind == _REFUSAL.pack(_STALE):
        return StaleTransferError(message)
    if kind == _REFUSAL.pack(_MISMATCH):
        return KVMismatchError(message, field.decode(errors="replace"))
    return KVTransferError(message)


_DELIVERY = struct.Struct("<QQQII")
"""Transfer, epoch, bytes of payload, number of writes, bytes of the note."""
_WRITE = struct.Struct("<IQQ")


@dataclass(frozen=True, slots=True)
class Announced:
    """A delivery as its DELIVER frame says it: where the bytes go that come beside the frame."""

    transfer: int
    epoch: int
    note: bytes
    writes: tuple[tuple[int, int, int], ...]
    """Region, offset, bytes."""
    payload: int

    @property
    def nbytes(self) -> int:
        return sum(write[2] for write in self.writes) + self.payload


def announce(delivery: Delivery) -> bytes:
    payload = 0 if delivery.payload is None else delivery.payload.nbytes
    head = _DELIVERY.pack(delivery.transfer, delivery.epoch, payload, len(delivery.writes), len(delivery.note))
    writes = b"".join(_WRITE.pack(write.region, write.offset, write.data.nbytes) for write in delivery.writes)
    return head + delivery.note + writes


def announced(body: bytes, most_bytes: int) -> Announced:
    """Read a DELIVER frame; FrameError unless it says what it must."""
    if len(body) < _DELIVERY.size:
        raise FrameError("a delivery without its head")
    transfer, epoch, payload, count, note = _DELIVERY.unpack_from(body)
    if len(body) != _DELIVERY.size + note + count * _WRITE.size:
        raise FrameError("a delivery whose frame has another length than it says")
    writes = tuple(_WRITE.iter_unpack(body[_DELIVERY.size + note :]))
    made = Announced(transfer, epoch, body[_DELIVERY.size : _DELIVERY.size + note], writes, payload)
    if made.nbytes > most_bytes:
        raise FrameError(f"a delivery of {made.nbytes} bytes; the most is {most_bytes}")
    return made
