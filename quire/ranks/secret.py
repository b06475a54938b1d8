"""Connections between machines: both sides prove that they know a secret, and mark every message with it.

Nothing is encrypted. A connection without the secret is dropped before anything it sends is read.
"""

from __future__ import annotations

import hmac
import os
import socket
import time

_NONCE = 16
TAG_BYTES = 16
_HANDSHAKE_SECONDS = 5.0


class WrongSecret(Exception):
    """The other side does not know the secret, or does not speak this protocol."""


class HmacSeal:
    """One direction of a connection: every message has its number in its tag, so none can be repeated or left out."""

    tag_bytes = TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def tag(self, head: bytes, payload: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "little") + head + payload, "sha256")[:TAG_BYTES]

    def check(self, head: bytes, payload: bytes, tag: bytes) -> bool:
        return hmac.compare_digest(self.tag(head, payload), tag)


def _proof(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, purpose + nonces, "sha256")


def _receive(sock: socket.socket, count: int, until: float) -> bytes:
    """So many bytes before the clock says `until`, however they come: who sends them one by one is not waited for."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until - time.monotonic()))
        more = sock.recv(count - len(data))
        if not more:
            raise WrongSecret("the connection was closed")
        data += more
    return data


def greet(sock: socket.socket, secret: bytes, name: int) -> tuple[HmacSeal, HmacSeal]:
    """The side that has connected, which tells its number: seals for sending and for receiving."""
    return _shake_hands(sock, secret, name)[1:]


def welcome(sock: socket.socket, secret: bytes) -> tuple[int, HmacSeal, HmacSeal]:
    """The side that was connected to: the other's number, and seals for sending and for receiving."""
    return _shake_hands(sock, secret, None)


def _shake_hands(sock: socket.socket, secret: bytes, name: int | None) -> tuple[int, HmacSeal, HmacSeal]:
    before = sock.gettimeout()
    sock.settimeout(_HANDSHAKE_SECONDS)
    until = time.monotonic() + _HANDSHAKE_SECONDS
    mine = os.urandom(_NONCE)
    try:
        if name is not None:
            # The one who is connected to proves itself first; the number counts only with the proof that follows.
            sock.sendall(mine)
            theirs = _receive(sock, _NONCE, until)
            nonces = mine + theirs
            _expect(sock, _proof(secret, b"engine", nonces), until)
            told = name.to_bytes(4, "little")
            sock.sendall(told + _proof(secret, b"rank" + told, nonces))
        else:
            theirs = _receive(sock, _NONCE, until)
            nonces = theirs + mine
            sock.sendall(mine + _proof(secret, b"engine", nonces))
            told = _receive(sock, 4, until)
            _expect(sock, _proof(secret, b"rank" + told, nonces), until)
            name = int.from_bytes(told, "little")
            return name, HmacSeal(_proof(secret, b"down", nonces)), HmacSeal(_proof(secret, b"up", nonces))
        return name, HmacSeal(_proof(secret, b"up", nonces)), HmacSeal(_proof(secret, b"down", nonces))
    except OSError as error:
        raise WrongSecret(str(error)) from None
    finally:
        sock.settimeout(before)


def _expect(sock: socket.socket, proof: bytes, until: float) -> None:
    if not hmac.compare_digest(_receive(sock, len(proof), until), proof):
        raise WrongSecret("the other side does not know the secret")
