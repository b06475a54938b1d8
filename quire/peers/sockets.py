"""Links over TCP: frames of JSON, a handshake in which both sides prove that they have the secret, signs of life.

Every link has two threads, one that reads and one that writes, so a peer that is stopped or slow holds up no other.
Nothing is encrypted: a network that others can listen to is no place for KV.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from quire.errors import PeerError, QuireError
from quire.listening import accepted
from quire.peers.bootstrap import endpoint_of
from quire.peers.link import Link
from quire.peers.messages import PROTOCOL_VERSION, Data
from quire.peers.mover import KVMover

_HELLO_BYTES = 4096
_ABOUT_BYTES = 4 << 20
_FRAME_BYTES = 256 << 20
HANDSHAKE_SECONDS = 5.0
"""For all of it: who says a byte now and then must not hold one of the listener's places."""
_LENGTH = struct.Struct(">I")


class Owner(Protocol):
    """Whom links belong to."""

    lease: float

    @property
    def mover(self) -> KVMover: ...

    def add_link(self, link: Link) -> None: ...

    def received(self, link: Link, data: object) -> None: ...

    def changed(self, link: Link) -> None: ...


class SocketLink(Link):
    """Connects by itself, or goes on with a connection that was accepted."""

    def __init__(self, owner: Owner, key: bytes, name: str, connect: Callable[[], socket.socket],
                 asks: bool) -> None:
        super().__init__(name)
        self._owner, self._key, self._connect, self._asks = owner, key, connect, asks
        self._socket: socket.socket | None = None
        self._deadline = 0.0
        """When the handshake must be over."""
        self._outgoing: SimpleQueue[Data | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._read, name=f"quire-peer-{name}", daemon=True),
                         threading.Thread(target=self._write, name=f"quire-peer-{name}-out", daemon=True)]

    def start(self) -> None:
        self._threads[0].start()

    def send(self, data: Data) -> None:
        if not self.closed:
            self._outgoing.put(data)

    def close(self, reason: str) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = reason
            open_socket = self._socket
        self._outgoing.put(None)
        if open_socket is not None:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        self._owner.changed(self)

    # ---- threads

    def _read(self) -> None:
        try:
            made = self._connect()
            with made:
                with self._lock:
                    if self.error is not None:
                        return
                    self._socket = made
                self._handshake(made)
                self._threads[1].start()
                self._owner.changed(self)
                while not self.closed:
                    self._owner.received(self, read_frame(made, _FRAME_BYTES))
        except (OSError, QuireError) as error:
            self.close(str(error) or type(error).__name__)
        except Exception as error:  # nothing that comes through a socket may end a thread silently
            self.close(f"{type(error).__name__}: {error}")

    def _write(self) -> None:
        """What is queued, and a sign of life whenever there was nothing for a while."""
        while not self.closed:
            try:
                data = self._outgoing.get(timeout=self._owner.lease / 4)
            except Empty:
                data = {"kind": "ping"}
            if data is None or self._socket is None:
                return
            try:
                write_frame(self._socket, data)
            except OSError as error:
                self.close(str(error))

    # ---- the handshake

    def _handshake(self, made: socket.socket) -> None:
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS
        made.settimeout(HANDSHAKE_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = self._introduce(made) if self._asks else self._welcome(made)
        made.settimeout(None)
        self.theirs = theirs
        self._owner.received(self, {"kind": "ping"})

    def _introduce(self, made: socket.socket) -> Data:
        """The side that connects proves itself first."""
        nonce = _nonce_of(_hello(read_frame(made, _HELLO_BYTES, self._deadline)))
        mine = secrets.token_bytes(32)
        write_frame(made, {"quire": PROTOCOL_VERSION, "nonce": mine.hex(), "proof": self._proof("asks", nonce, mine)})
        answer = _hello(read_frame(made, _ABOUT_BYTES, self._deadline))
        if not hmac.compare_digest(str(answer.get("proof")), self._proof("answers", mine, nonce)):
            raise PeerError("the other engine does not have this one's secret")
        theirs = self._checked(made, answer.get("about"))
        write_frame(made, {"quire": PROTOCOL_VERSION, "about": self._owner.mover.describe()})
        return theirs

    def _welcome(self, made: socket.socket) -> Data:
        mine = secrets.token_bytes(32)
        write_frame(made, {"quire": PROTOCOL_VERSION, "nonce": mine.hex()})
        hello = _hello(read_frame(made, _HELLO_BYTES, self._deadline))
        nonce = _nonce_of(hello)
        if not hmac.compare_digest(str(hello.get("proof")), self._proof("asks", mine, nonce)):
            _refuse(made, "the secret is another one")
        write_frame(made, {"quire": PROTOCOL_VERSION, "proof": self._proof("answers", nonce, mine),
                           "about": self._owner.mover.describe()})
        theirs = self._checked(made, _hello(read_frame(made, _ABOUT_BYTES, self._deadline)).get("about"))
        # An engine that takes KV on all addresses is reached where its link comes from.
        return {**theirs, "seen_at": made.getpeername()[0]}

    def _checked(self, made: socket.socket, about: object) -> Data:
        if not isinstance(about, dict):
            raise PeerError("the other engine does not say what it is")
        try:
            self._owner.mover.check(about, receives=self._asks)
        except QuireError as error:
            _refuse(made, str(error))
        return about

    def _proof(self, who: str, first: bytes, second: bytes) -> str:
        return hmac.new(self._key, who.encode() + first + second, "sha256").hexdigest()


def _hello(data: object) -> Data:
    if not isinstance(data, dict):
        raise PeerError("what answers there is no engine of ours")
    if "refused" in data:
        raise PeerError(f"refused: {str(data['refused'])[:500]}")
    if data.get("quire") != PROTOCOL_VERSION:
        raise PeerError(f"the other engine speaks version {data.get('quire')!r:.20} of the protocol, "
                        f"this one {PROTOCOL_VERSION}")
    return data


def _nonce_of(hello: Data) -> bytes:
    nonce = hello.get("nonce")
    if not isinstance(nonce, str) or len(nonce) != 64:
        raise PeerError("the handshake has no nonce")
    try:
        return bytes.fromhex(nonce)
    except ValueError as error:
        raise PeerError("the handshake has no nonce") from error


def _refuse(made: socket.socket, reason: str) -> None:
    """Tell the other side, so that its operator reads it too, and give the link up."""
    with contextlib.suppress(OSError):
        write_frame(made, {"quire": PROTOCOL_VERSION, "refused": reason})
    raise PeerError(reason)


# ---- frames


def write_frame(made: socket.socket, data: dict[str, Any]) -> None:
    body = json.dumps(data, separators=(",", ":")).encode()
    made.sendall(_LENGTH.pack(len(body)) + body)


def read_frame(made: socket.socket, most: int, deadline: float | None = None) -> object:
    """Raises PeerError for what is no frame, too long, or not whole by the deadline."""
    (length,) = _LENGTH.unpack(_read_exactly(made, _LENGTH.size, deadline))
    if length > most:
        raise PeerError(f"a message of {length} bytes is longer than the {most} that are read")
    try:
        found: object = json.loads(_read_exactly(made, length, deadline))
    except (ValueError, RecursionError) as error:
        raise PeerError("a message is not JSON") from error
    return found


def _read_exactly(made: socket.socket, count: int, deadline: float | None) -> bytes:
    parts = []
    while count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerError("the handshake takes too long")
            made.settimeout(left)
        part = made.recv(min(count, 1 << 20))
        if not part:
            raise PeerError("the other side has closed the link")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# ---- both ends


class PeerListener:
    """Accepts links of engines that have the secret."""

    def __init__(self, owner: Owner, key: bytes, host: str, port: int, most_links: int = 256) -> None:
        self._owner, self._key, self._most_links = owner, key, most_links
        self._links: list[SocketLink] = []
        self._socket = socket.create_server((host, port), family=_family(host))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="quire-peers", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        for made, where in accepted(self._socket):
            self._links = [link for link in self._links if not link.closed]
            if len(self._links) >= self._most_links:
                made.close()
                continue
            link = SocketLink(self._owner, self._key, f"{where[0]}:{where[1]}", partial(_made, made), asks=False)
            self._links.append(link)
            self._owner.add_link(link)
            link.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5.0)


def connector(owner: Owner, key: bytes) -> Callable[[str], Link]:
    """Makes links to addresses such as kv://host:port or http://server:port, which is asked for the former."""

    def connect(address: str) -> Link:
        def dial() -> socket.socket:
            return socket.create_connection(endpoint_of(address, key), timeout=HANDSHAKE_SECONDS)

        link = SocketLink(owner, key, address, dial, asks=True)
        link.start()
        return link

    return connect


def _made(accepted: socket.socket) -> socket.socket:
    return accepted


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
