"""Moves KV of a model's tensors between engines: what this room asks for, done by `kvtransfer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.errors import KVMismatchError, KVTransferError
from quire.kvtransfer.fingerprint import Fingerprint
from quire.kvtransfer.layout import LayoutDescription, check_compatible
from quire.kvtransfer.memory import KVMemory
from quire.kvtransfer.receiver import KVReceiver
from quire.kvtransfer.sender import KVSender
from quire.kvtransfer.transports import usable
from quire.peers.mover import Arrived, Data, Tables


class TensorMover:
    """Both halves for an engine. One of several ranks looks to others like one that has all: its ranks share the work
    behind `store`."""

    def __init__(self, store: KVMemory, secret: bytes, fingerprint: Fingerprint, transports: Sequence[str], host: str,
                 *, receives: bool, convert: bool, timeout: float) -> None:
        self._store, self._secret, self._fingerprint = store, secret, fingerprint
        self._transports, self._convert, self._timeout = [each.name for each in usable(transports)], convert, timeout
        self._receiver = KVReceiver(store, secret, transports, host, convert) if receives else None

    def describe(self) -> Data:
        addresses = [] if self._receiver is None else [self._receiver.address()]
        return {"fingerprint": self._fingerprint.to_data(), "layouts": [self._store.layout.to_data()],
                "addresses": addresses, "transports": self._transports, "converts": self._convert}

    def check(self, theirs: Data, receives: bool) -> None:
        convert = self._convert if receives else theirs.get("converts") is True
        self._fingerprint.check(Fingerprint.from_data(theirs.get("fingerprint")), convert)
        layouts = theirs.get("layouts")
        if not isinstance(layouts, list) or not layouts:
            raise KVMismatchError("the other engine does not say how its KV lies", "layout")
        for layout in layouts:
            check_compatible(self._store.layout, LayoutDescription.from_data(layout), convert)
        named = theirs.get("transports")
        others = [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
        if not set(others) & set(self._transports):
            raise KVMismatchError(f"no transport in common: the other engine has {', '.join(others)[:80] or 'none'}, "
                                  f"this one {', '.join(self._transports)} (kv_transports)", "transports")

    def open(self, transfer: int, theirs: Data, tables: Tables, starts: Sequence[int], end: int, arrived: Arrived,
             failed: Callable[[str], None]) -> Data:
        if self._receiver is None:
            raise KVTransferError("this engine takes no KV of others")
        return self._receiver.open(transfer, transfer, tables, starts, end, arrived, failed)

    def shut(self, transfer: int) -> None:
        if self._receiver is not None:
            self._receiver.close(transfer)

    def sender(self, theirs: Data) -> KVSender:
        addresses = theirs.get("addresses")
        if not isinstance(addresses, list) or not addresses or not all(isinstance(each, dict) for each in addresses):
            raise KVTransferError("the other engine does not say where its KV is to go")
        return KVSender(self._store, addresses, self._secret, transports=self._transports, timeout=self._timeout,
                        convert=theirs.get("converts") is True, host=theirs.get("seen_at"))

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()
