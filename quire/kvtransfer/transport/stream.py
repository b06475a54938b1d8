"""What transports share whose sides talk over a stream socket: a listener with a thread for each writer, and a writer.

They differ in where the bytes of a delivery travel: behind their frame, or through memory beside it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from abc import abstractmethod
from threading import Lock, Thread

from quire.errors import KVTransferError
from quire.kvtransfer.transport.base import Address, Delivery, Greet, OpenTransfers, PeerLostError, Receiver, Writer
from quire.kvtransfer.transport.session import (
    DELIVER,
    DONE,
    HELLO,
    REFUSED,
    WELCOME,
    Announced,
    FrameError,
    Session,
    accept_session,
    announce,
    announced,
    refusal,
    refused,
)
from quire.listening import accepted

log = logging.getLogger("quire.kvtransfer")
HANDSHAKE_SECONDS = 10.0
MOST_WRITERS = 256
"""Connections at once, those included that have not proven yet that they know the secret."""
_CLOSE_SECONDS = 10.0


class Connection:
    """One writer, on the receiver's side."""

    def __init__(self, session: Session, peer: object) -> None:
        self.session, self.peer = session, peer


class StreamReceiver(Receiver):
    """Accepts writers on a listening socket and takes their deliveries one after the other."""

    most_bytes: int
    """Of one delivery."""

    def __init__(self, listener: socket.socket, transfers: OpenTransfers, secret: bytes, greet: Greet) -> None:
        super().__init__(transfers)
        if not secret:
            raise KVTransferError("KV transfers need a secret that both sides share")
        self._listener, self._secret, self._greet = listener, secret, greet
        self._lock = Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: set[Thread] = set()
        self._stopped = False
        self._accepting = Thread(target=self._accept, name="quire-kv-accept", daemon=True)
        self._accepting.start()

    # ---- one writer

    @abstractmethod
    def connected(self, session: Session, peer: object, welcome: bytes) -> Connection:
        """Answer a writer that was let in with WELCOME."""

    @abstractmethod
    def take(self, connection: Connection, delivery: Announced) -> None:
        """Bring the bytes of a delivery in, and tell its landing. Raising KVTransferError refuses it; the stream must
        be behind the delivery then. PeerLostError ends the connection."""

    def disconnected(self, connection: Connection) -> None:
        """The writer is gone."""

    def _serve(self, sock: socket.socket) -> None:
        connection: Connection | None = None
        try:
            connection = self._let_in(sock)
            while connection is not None:
                kind, body = connection.session.receive()
                if kind != DELIVER:
                    raise FrameError(f"a frame of kind {kind} where a delivery belongs")
                self._answer(connection, announced(body, self.most_bytes))
        except FrameError as error:
            log.warning("closed the connection of a KV writer: %s", error)
        except PeerLostError as error:
            log.debug("a KV writer disconnected: %s", error)
        except Exception:
            log.exception("closed the connection of a KV writer after an unexpected error")
        finally:
            if connection is not None:
                self.disconnected(connection)
            with self._lock:
                self._sockets.discard(sock)
            sock.close()

    def _let_in(self, sock: socket.socket) -> Connection | None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        session = accept_session(sock, self._secret, deadline)
        kind, hello = session.receive(deadline)
        if kind != HELLO:
            raise FrameError(f"a frame of kind {kind} where an introduction belongs")
        try:
            peer, welcome = self._greet(hello)
        except KVTransferError as error:
            session.send(REFUSED, refusal(error), deadline)
            return None
        return self.connected(session, peer, welcome)

    def _answer(self, connection: Connection, delivery: Announced) -> None:
        try:
            self.take(connection, delivery)
        except PeerLostError:
            raise
        except Exception as error:
            if not isinstance(error, KVTransferError):
                log.exception("received KV could not be written into its blocks")
            connection.session.send(REFUSED, refusal(error))
        else:
            connection.session.send(DONE, b"")

    # ---- all of them

    def _accept(self) -> None:
        for sock, _ in accepted(self._listener):
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                if self._stopped or len(self._sockets) >= MOST_WRITERS:
                    sock.close()
                    continue
                self._sockets.add(sock)
                thread = Thread(target=self._serve, args=(sock,), name="quire-kv-receive", daemon=True)
                self._threads.add(thread)
            tune(sock)
            thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            sockets, threads = list(self._sockets), list(self._threads)
        for each in (self._listener, *sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepting, *threads):
            if thread.ident is not None:
                thread.join(_CLOSE_SECONDS)


class StreamWriter(Writer):
    """Delivers over one session."""

    def __init__(self, session: Session, welcome: bytes) -> None:
        self._session = session
        self.welcome = welcome
        self._lock = Lock()
        self._broken: str | None = None

    @abstractmethod
    def send(self, session: Session, delivery: Delivery, announcement: bytes, deadline: float) -> None:
        """Send the bytes of a delivery and its DELIVER frame."""

    def deliver(self, delivery: Delivery, timeout: float) -> None:
        if delivery.nbytes > self.most_bytes:
            raise KVTransferError(f"a delivery of {delivery.nbytes} bytes; the most is {self.most_bytes}")
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._broken is not None:
                raise PeerLostError(f"the connection is broken: {self._broken}")
            try:
                self.send(self._session, delivery, announce(delivery), deadline)
                kind, body = self._session.receive(deadline)
                if kind not in (DONE, REFUSED):
                    raise FrameError(f"a frame of kind {kind} where an answer belongs")
            except BaseException as error:  # an interrupt too leaves the stream in the middle of something
                self._broken = str(error) or type(error).__name__
                self._session.cut()
                raise
        if kind == REFUSED:
            raise refused(body)

    @property
    def broken(self) -> bool:
        """Aborted, or in the middle of something that failed."""
        return self._broken is not None

    def abort(self) -> None:
        self._broken = self._broken or "aborted"
        self._session.cut()

    def close(self) -> None:
        self.abort()
        with self._lock:
            self._session.close()


def introduce(session: Session, hello: bytes, deadline: float) -> bytes:
    """Say who we are; what the receiver answers, or the error that it refuses us with."""
    session.send(HELLO, hello, deadline)
    kind, body = session.receive(deadline)
    if kind == REFUSED:
        raise refused(body)
    if kind != WELCOME:
        raise FrameError(f"a frame of kind {kind} where a welcome belongs")
    return body


def listening_socket(host: str) -> socket.socket:
    """On a port of the system's choice."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=64)
    except OSError as error:
        raise KVTransferError(f"KV cannot be received at {host}: {error}") from error


def dial(address: Address, timeout: float) -> socket.socket:
    """A connection to a receiver that listens at `address`."""
    try:
        sock = socket.create_connection((str(address["host"]), int(address["port"])), timeout)
    except (OSError, KeyError, ValueError) as error:
        raise PeerLostError(f"no KV receiver answers at {address!r:.80}: {error}") from error
    sock.settimeout(None)
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Send small frames at once, notice a machine that is gone."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":  # a machine that is gone is noticed after a minute, not after two hours
            for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
