"""What a transport is: a receiver opens transfers, a writer delivers bytes for them, and a late write can never hurt.

A delivery is a small note and bytes: either straight writes (region, offset, bytes) into memory of the receiver, or one
payload in a form that the receiver unpacks. It counts when the receiver has said so: `Writer.deliver` returns after
every byte is in its place and `Landing.arrived` has returned.

A transfer has an epoch that is never used again. Before anything of a delivery is copied in, the transfer is looked up
and its epoch compared, under the transfer's lock; `OpenTransfers.close` takes the same lock. So when `close` has
returned, nothing of that transfer is written any more, whatever its writer is doing. A transport whose writer puts
bytes into the receiver's memory by itself (Mooncake) lets them land in memory of the connection, and they are copied
from there after the same check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any, Protocol

from quire.errors import KVTransferError

Address = dict[str, Any]
"""Where a receiver listens: plain data, to be sent to writers as JSON."""
ALL_INTERFACES = ("", "0.0.0.0", "::")


class StaleTransferError(KVTransferError):
    """The transfer was closed, or the delivery is of an earlier epoch: nothing of it was, or will be, written."""


class PeerLostError(KVTransferError):
    """The other side died, hangs or was cut off: whether the delivery arrived is not known."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes for one place in the receiver's memory."""

    region: int
    offset: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is delivered at once. With many writes no payload need be there, and the other way round."""

    transfer: int
    epoch: int
    note: bytes
    """Handed to `Landing.arrived` as it is."""
    writes: Sequence[Write] = ()
    payload: memoryview | None = None

    @property
    def nbytes(self) -> int:
        return sum(write.data.nbytes for write in self.writes) + (0 if self.payload is None else self.payload.nbytes)


class Landing(Protocol):
    """One transfer's memory on the receiver's side. Called under the transfer's lock, on a thread of the transport."""

    def place(self, region: int, offset: int, nbytes: int) -> memoryview:
        """Where a straight write goes; raises KVTransferError where this transfer may not write."""
        ...

    def arrived(self, peer: object, note: bytes, payload: memoryview) -> None:
        """Every byte of a delivery is here; `payload` is valid during the call only. Raising refuses the delivery."""
        ...


Greet = Callable[[bytes], tuple[object, bytes]]
"""What a receiver does when a writer introduces itself: an object that stands for it, and an answer. May raise."""


class OpenTransfers:
    """Transfers that take deliveries, each with its epoch and a lock; shared by all transports of a receiving rank."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: dict[int, tuple[int, Landing, RLock]] = {}

    def open(self, transfer: int, epoch: int, landing: Landing) -> None:
        """Take deliveries from now on."""
        with self._lock:
            if transfer in self._open:
                raise KVTransferError(f"transfer {transfer} is open already")
            self._open[transfer] = (epoch, landing, RLock())

    def close(self, transfer: int) -> None:
        """Done, or aborted: when this returns nothing of the transfer is written any more."""
        with self._lock:
            found = self._open.pop(transfer, None)
        if found is not None:
            with found[2]:  # whoever holds it looked the transfer up before it was taken out
                pass

    @contextmanager
    def entered(self, transfer: int, epoch: int) -> Iterator[Landing]:
        """Hold a transfer while something of it is copied in."""
        with self._lock:
            found = self._open.get(transfer)
        if found is None or found[0] != epoch:
            raise StaleTransferError(f"transfer {transfer} takes nothing of epoch {epoch}")
        with found[2]:
            with self._lock:
                still_open = self._open.get(transfer) is found
            if not still_open:
                raise StaleTransferError(f"transfer {transfer} was closed")
            yield found[1]

    def __len__(self) -> int:
        return len(self._open)


class Receiver(ABC):
    """Takes deliveries from any number of writers, on threads of its own."""

    def __init__(self, transfers: OpenTransfers) -> None:
        self.transfers = transfers

    @property
    @abstractmethod
    def address(self) -> Address: ...

    @abstractmethod
    def stop(self) -> None:
        """Cut off all writers and let go of sockets, threads and memory. Idempotent."""


class Writer(ABC):
    """One connection to a receiver; one delivery at a time."""

    welcome: bytes
    """What the receiver told us when we introduced ourselves."""
    most_bytes: int
    """Of one delivery."""

    @abstractmethod
    def buffer(self, nbytes: int) -> memoryview:
        """Memory to put a payload together in; a payload that lies there is not copied once more on the way. Valid
        until the next call."""

    @abstractmethod
    def deliver(self, delivery: Delivery, timeout: float) -> None:
        """Returns when all of it has arrived and counts. StaleTransferError: none of it counts, and nothing of it will
        be written. PeerLostError: unknown, and this writer is of no use any more. KVTransferError: refused."""

    @abstractmethod
    def abort(self) -> None:
        """From any thread: a `deliver` that is under way fails at once. The writer is of no use any more."""

    @abstractmethod
    def close(self) -> None: ...


class Transport(ABC):
    """A way for bytes to get from one process to another."""

    name: str

    @abstractmethod
    def missing(self) -> str | None:
        """Why it cannot be used on this machine; None if it can."""

    @abstractmethod
    def listen(self, transfers: OpenTransfers, secret: bytes, greet: Greet, host: str = "127.0.0.1") -> Receiver: ...

    @abstractmethod
    def connect(self, address: Address, secret: bytes, hello: bytes, timeout: float) -> Writer:
        """Raises PeerLostError if there is no answer, KVMismatchError or KVTransferError if the peer refuses."""
