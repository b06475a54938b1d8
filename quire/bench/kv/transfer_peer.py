"""The receiving process of `quire bench transfer`: takes KV into its caches, and plain bytes over loopback TCP."""

from __future__ import annotations

import json
import socket
import sys
from threading import Thread
from typing import Any

from quire.bench.kv.transfer_shape import Shape
from quire.kvtransfer.receiver import KVReceiver
from quire.kvtransfer.transport.base import PeerLostError
from quire.kvtransfer.transport.session import receive_exactly, receive_some, wait_readable


def loopback(listener: socket.socket, nbytes: int) -> None:
    """What TCP alone does: bytes into memory that exists already, one byte back."""
    target = memoryview(bytearray(nbytes))
    try:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            left = int.from_bytes(receive_exactly(sock, 8, None), "little")
            while left:
                wait_readable(sock, None)
                left -= receive_some(sock, [target[: min(left, 1 << 20)]])
            sock.sendall(b"\0")
    except PeerLostError:
        pass


def main() -> None:
    given = json.loads(sys.stdin.readline())
    shape, secret = Shape(**given["shape"]), bytes.fromhex(given["secret"])
    receivers: dict[str, KVReceiver] = {}
    for form, size in (("equal", given["block_size"]), ("unequal", given["block_size"] * 2)):
        store = shape.store(size, -(-given["tokens"] // size))
        receivers[form] = KVReceiver(store, secret, given["transports"])
    listener = socket.create_server(("127.0.0.1", 0))
    Thread(target=loopback, args=(listener, given["bytes"]), daemon=True).start()
    say({"loopback": listener.getsockname()[1],
         "addresses": {form: receiver.address() for form, receiver in receivers.items()}})
    for number, line in enumerate(sys.stdin, 1):
        asked = json.loads(line)
        receiver = receivers[asked["form"]]
        if "close" in asked:
            receiver.close(asked["close"])
            say({})
        else:
            say(receiver.open(number, number, [asked["table"]], [0], asked["tokens"], lambda start, end: None))


def say(data: Any) -> None:
    print(json.dumps(data), flush=True)


if __name__ == "__main__":
    main()
