"""What is cut, changed, repeated or from somebody else on its way is refused, and never counts as arrived."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import KVTransferError
from quire.kvtransfer.notes import Note
from quire.kvtransfer.receiver import KVReceiver
from quire.kvtransfer.sender import KVSender
from quire.kvtransfer.transport.base import Delivery, PeerLostError, StaleTransferError, Write
from quire.kvtransfer.transport.session import (
    DELIVER,
    REFUSED,
    FrameError,
    announce,
    announced,
    open_session,
    receive_exactly,
    refusal,
    refused,
    send_all,
)
from quire.kvtransfer.transport.stream import introduce
from tests.kvtransfer.layouts import Model, fill, make_store

SECRET = b"a secret of both sides"
MODEL = Model(2, 4, (None, None))
TOKENS = 18


class Meddler:
    """A proxy in front of a receiver that changes what a writer sends, from one byte of the stream on."""

    def __init__(self, port: int, at: int, how: str) -> None:
        self._at, self._how, self._port = at, how, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.meddled = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        inner, _ = self._listener.accept()
        outer = socket.create_connection(("127.0.0.1", self._port))
        back = threading.Thread(target=self._pump, args=(outer, inner, False), daemon=True)
        back.start()
        self._pump(inner, outer, True)
        back.join(30)
        inner.close()
        outer.close()

    def _pump(self, source: socket.socket, target: socket.socket, meddle: bool) -> None:
        at = 0
        try:
            while data := source.recv(1 << 16):
                if meddle and at <= self._at < at + len(data):
                    self.meddled = True
                    data = self._changed(data, self._at - at)
                at += len(data)
                target.sendall(data)
                if meddle and self.meddled and self._how in ("cut", "drop"):
                    break  # a receiver that misses a byte would wait for it
        except OSError:
            pass
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _changed(self, data: bytes, at: int) -> bytes:
        return {"flip": data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :], "cut": data[:at],
                "repeat": data[: at + 1] + data[at:], "drop": data[:at] + data[at + 1 :],
                "insert": data[:at] + b"QKV1" + data[at:]}[self._how]

    def close(self) -> None:
        self._listener.close()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("how", ["flip", "cut", "repeat", "drop", "insert"])
def test_what_was_changed_never_arrives(how: str) -> None:
    """At every part of a stream: handshake, frames, bytes of straight writes, payload, digest."""
    writer, shuffle = make_store(MODEL, 4, 8, tokens_last=True), random.Random(how)
    tables = [[4, 5, 0, 6, 2]]
    fill(writer, MODEL, tables, TOKENS)
    places = sorted({*shuffle.sample(range(6000), 14), *shuffle.sample(range(700), 14), 0, 4, 40})
    failures = 0
    for transfer, at in enumerate(places):
        reader = make_store(MODEL, 4, 8, tokens_last=True)
        receiver = KVReceiver(reader, SECRET, ["tcp"])
        address = receiver.address()
        meddler = Meddler(address["transports"]["tcp"]["port"], at, how)
        address["transports"]["tcp"]["port"] = meddler.port
        came: list[tuple[int, int]] = []

        def arrived(start: int, end: int, reader=reader, came=came) -> None:
            for here, there in zip(writer.raw, reader.raw, strict=True):
                for token in range(start, end):
                    block, slot = tables[0][token // 4], token % 4
                    same = here[block, ..., slot] if here.shape[3] == 4 else here[block, :, slot]
                    assert torch.equal(same, there[block, ..., slot] if here.shape[3] == 4 else there[block, :, slot])
            came.append((start, end))

        errors: list[str] = []
        ticket = receiver.open(transfer, 1, tables, [0], TOKENS, arrived, errors.append)
        try:
            sender = KVSender(writer, [address], SECRET, transports=["tcp"], timeout=60.0)
            sender.send(ticket, tables, 0, TOKENS)
            assert not meddler.meddled, f"{how} at {at} was not noticed"
            sender.close()
        except KVTransferError:
            failures += 1
            assert meddler.meddled
            assert came in ([], [(0, 16)])
        finally:
            receiver.stop()
            meddler.close()
        assert errors == []
    assert failures > len(places) // 2


def test_strangers_are_cut_off_and_others_served() -> None:
    store = make_store(MODEL, 4, 8, tokens_last=True)
    receiver = KVReceiver(store, SECRET, ["tcp"])
    try:
        address = receiver.address()["transports"]["tcp"]
        shuffle = random.Random(1)
        for length in (0, 1, 36, 36, 68, 500):
            with socket.create_connection((address["host"], address["port"]), 20) as sock:
                text = shuffle.randbytes(length)
                with contextlib.suppress(OSError):  # it may have hung up before all is sent
                    sock.sendall(b"QKV1" + text[4:] if length == 68 else text)
                    sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(1 << 16):  # it hangs up by itself
                        pass
        KVSender(store, [receiver.address()], SECRET, transports=["tcp"]).close()
    finally:
        receiver.stop()


def test_what_comes_after_its_transfer_was_closed_is_dropped() -> None:
    """The writer stands still in the middle of a write: closing waits for nobody, and the rest goes nowhere."""
    writer, reader = make_store(MODEL, 4, 64, tokens_last=True), make_store(MODEL, 4, 64, tokens_last=True)
    receiver = KVReceiver(reader, SECRET, ["tcp"])
    address = receiver.address()["transports"]["tcp"]
    sock = socket.create_connection((address["host"], address["port"]), 20)
    try:
        table = list(range(64))
        receiver.open(1, 1, [table], [0], 256, lambda start, end: None)
        deadline = time.monotonic() + 60
        session = open_session(sock, SECRET, deadline)
        introduce(session, _hello(writer), deadline)
        data = memoryview(bytearray(b"\1" * reader.raw[0].nbytes))
        delivery = Delivery(1, 1, Note(0, 256, False).to_bytes(), [Write(0, 0, data)])
        session.send(DELIVER, announce(delivery), deadline, [data[: len(data) // 2]])
        while reader.bytes_of(0)[len(data) // 2 - 1] != 1:
            assert time.monotonic() < deadline
        receiver.close(1)
        for raw in reader.raw:
            raw.fill_(5.0)
        send_all(sock, [data[len(data) // 2 :]], deadline)
        session.send(4, b"whatever", deadline)  # the digest, which does not matter any more
        kind, body = session.receive(deadline)
        assert kind == REFUSED and isinstance(refused(body), StaleTransferError)
        assert all((raw == 5.0).all() for raw in reader.raw)
        receiver.open(2, 2, [table], [0], 256, lambda start, end: None)
        session.send(DELIVER, announce(Delivery(2, 2, b"")), deadline)
        session.send(4, b"", deadline)
        with pytest.raises(PeerLostError):  # a digest that is none
            session.receive(deadline)
    finally:
        sock.close()
        receiver.stop()


def _hello(store) -> bytes:
    import json

    return json.dumps({"rank": 0, "layouts": [store.layout.to_data()]}).encode()


@given(st.binary(max_size=400))
def test_any_bytes_are_a_delivery_or_refused(body: bytes) -> None:
    try:
        made = announced(body, 1 << 30)
    except FrameError:
        return
    assert made.nbytes <= 1 << 30


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=50),
       st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 40)), max_size=5),
       st.none() | st.integers(0, 40), st.integers(0, 400))
def test_a_delivery_is_announced_as_it_is(transfer: int, epoch: int, note: bytes,
                                          writes: list[tuple[int, int, int]], payload: int | None, cut: int) -> None:
    delivery = Delivery(transfer, epoch, note, [Write(*place, memoryview(bytes(n))) for *place, n in writes],
                        None if payload is None else memoryview(bytes(payload)))
    body = announce(delivery)
    made = announced(body, 1 << 20)
    assert (made.transfer, made.epoch, made.note, list(made.writes)) == (transfer, epoch, note, writes)
    assert made.payload == (payload or 0) and made.nbytes == delivery.nbytes
    if cut < len(body):
        with pytest.raises(FrameError):
            announced(body[:cut], 1 << 20)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_refusal(body: bytes) -> None:
    assert isinstance(refused(body), KVTransferError)


def test_refusals_keep_their_kind() -> None:
    from quire.errors import KVMismatchError

    again = refused(refusal(KVMismatchError("another rope: x", "rope")))
    assert isinstance(again, KVMismatchError) and again.field == "rope" and "another rope" in str(again)
    assert isinstance(refused(refusal(StaleTransferError("late"))), StaleTransferError)
    assert "KeyError" in str(refused(refusal(KeyError("x"))))


def test_a_handshake_needs_the_secret_on_both_sides() -> None:
    """A receiver that does not know it cannot pass itself off as one."""
    left, right = socket.socketpair()
    deadline = time.monotonic() + 60

    def impostor() -> None:
        receive_exactly(right, 36, deadline)
        send_all(right, [memoryview(b"QKV1" + bytes(64))], deadline)

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(FrameError, match="does not know the secret"):
        open_session(left, SECRET, deadline)
    thread.join(60)
    left.close()
    right.close()
