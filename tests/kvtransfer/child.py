"""One side of a KV transfer in a process of its own, to be stopped and killed: `child.py receive|send TRANSPORT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from quire.errors import KVTransferError
from quire.kvtransfer.receiver import KVReceiver
from quire.kvtransfer.sender import KVSender
from tests.kvtransfer.layouts import Model, fill, make_store

SECRET = b"a secret of both sides"
MODEL = Model(4, 16, (None, None))
TABLE = [9, 3, 4, 5, 6, 0, 11, 10]
TOKENS = 8 * 16 - 5


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def receive(name: str) -> None:
    receiver = KVReceiver(make_store(MODEL, 16, 16, tokens_last=True), SECRET, [name])
    ticket = receiver.open(1, 1, [TABLE], [0], TOKENS, lambda start, end: None)
    say(address=receiver.address(), ticket=ticket)
    sys.stdin.read()


def send(name: str) -> None:
    """For each line that comes in, the same tokens over and over, until they are refused."""
    store = make_store(MODEL, 16, 16, tokens_last=True)
    fill(store, MODEL, [TABLE], TOKENS)
    for line in sys.stdin:
        given = json.loads(line)
        try:
            sender = KVSender(store, [given["address"]], SECRET, transports=[name], timeout=60.0)
            while True:
                sender.send(given["ticket"], [TABLE], 0, TOKENS)
                say(sent=TOKENS)
        except KVTransferError as error:
            say(error=type(error).__name__)


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](sys.argv[2])
