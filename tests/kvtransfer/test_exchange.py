"""From a sender's blocks into a receiver's, through every transport: exact, straight or by token, by any ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from quire.errors import KVMismatchError, KVTransferError
from quire.kvtransfer.layout import Span, first_read
from quire.kvtransfer.receiver import KVReceiver
from quire.kvtransfer.sender import KVSender
from quire.kvtransfer.store import KVStore
from quire.kvtransfer.transport.base import PeerLostError, StaleTransferError
from quire.kvtransfer.transports import TRANSPORTS, transport
from tests.kvtransfer.layouts import Model, fill, make_store
from tests.kvtransfer.test_store import cut, expected

SECRET = b"a secret of both sides"
MODEL = Model(4, 4, (None, 9, None))


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    missing = transport(request.param).missing()
    if missing is not None:
        pytest.skip(missing)
    return str(request.param)


@contextmanager
def engines(name: str, writers: list[KVStore],
            readers: list[KVStore]) -> Iterator[tuple[list[KVSender], list[KVReceiver]]]:
    receivers = [KVReceiver(reader, SECRET, [name]) for reader in readers]
    addresses = [receiver.address() for receiver in receivers]
    layouts = [writer.layout for writer in writers]
    senders = [KVSender(writer, addresses, SECRET, rank=rank, layouts=layouts, transports=[name])
               for rank, writer in enumerate(writers)]
    try:
        yield senders, receivers
    finally:
        for sender in senders:
            sender.close()
        for receiver in receivers:
            receiver.stop()


def tables_for(store: KVStore, tokens: int, seed: int) -> list[list[int]]:
    shuffle, count = random.Random(seed), -(-tokens // store.layout.block_size)
    blocks = [shuffle.sample(range(store.layout.num_blocks), count) for _ in range(MODEL.num_groups)]
    return [sorted(table) if seed % 2 else table for table in blocks]


CASES = {
    "straight": ((4, True, 1), (4, True, 1)),
    "another block size": ((4, True, 1), (7, True, 1)),
    "CPU to GPU's layout": ((4, True, 1), (4, False, 1)),
    "two ranks to one": ((4, True, 2), (4, True, 1)),
    "one rank to four": ((8, False, 1), (3, True, 4)),
    "three ranks to two": ((5, True, 3), (4, False, 2)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_every_number_comes_to_its_place(name: str, case: str, seed: int) -> None:
    made = [[make_store(MODEL, size, 40, tokens_last=last, heads=heads) for heads in cut(MODEL.heads, ranks)]
            for size, last, ranks in CASES[case]]
    writers, readers = made
    tokens, start = 30, 8 if CASES[case][1][0] == 4 else 5
    here, there = tables_for(writers[0], tokens, seed), tables_for(readers[0], tokens, seed + 2)
    starts = [first_read(window, start, tokens) for window in (None, 9)]
    for writer in writers:
        fill(writer, MODEL, here, tokens)
    arrivals: list[list[tuple[int, int]]] = [[] for _ in readers]
    with engines(name, writers, readers) as (senders, receivers):
        tickets = [receiver.open(7, 3, there, starts, tokens, lambda a, b, came=came: came.append((a, b)))
                   for receiver, came in zip(receivers, arrivals, strict=True)]
        for first, last in ((start, 13), (13, 29), (29, 30)):
            for sender in senders:
                if case == "two ranks to one" and sender is senders[1]:
                    assert all(each[1] <= first for each in arrivals[0]), "arrived before every rank had sent its part"
                sender.send(tickets[0], here, first, last)
        for receiver in receivers:
            receiver.close(7)
    span = Span(start, tokens, tuple(starts))
    for reader, came in zip(readers, arrivals, strict=True):
        assert {t for a, b in came for t in range(a, b)} == set(range(start, tokens))
        tail = expected(reader, MODEL, there, span)
        for (layer, part), raw, wanted in zip(reader.layout.tensors(), reader.raw, tail, strict=True):
            touched = wanted != -7.0
            assert torch.equal(raw[touched], wanted[touched]), (layer.layer, part.name)
            untouched = raw[~touched] == -7.0
            # Straight writes are of whole blocks: with a window, the first one's tokens before it may come along.
            assert untouched.all() or (case == "straight" and layer.window is not None)


def test_nothing_is_written_after_close_or_for_another_epoch(name: str) -> None:
    writer, reader = (make_store(MODEL, 4, 16, tokens_last=True) for _ in range(2))
    tables = tables_for(writer, 20, 1)
    fill(writer, MODEL, tables, 20)
    with engines(name, [writer], [reader]) as ([sender], [receiver]):
        ticket = receiver.open(1, 1, tables, [0, 0], 20, lambda a, b: None)
        receiver.close(1)
        for first, last in ((0, 20), (1, 3)):
            with pytest.raises(StaleTransferError):
                sender.send(ticket, tables, first, last)
        arrived: list[tuple[int, int]] = []
        again = receiver.open(1, 2, tables, [0, 0], 20, lambda a, b: arrived.append((a, b)))
        with pytest.raises(StaleTransferError):
            sender.send(ticket, tables, 0, 20)
        assert all((raw == -7.0).all() for raw in reader.raw)
        assert sender.send(again, tables, 0, 20) == len(writer.layout.pieces()) * 20 * 4 * 4 * 4
        assert arrived and torch.equal(reader.raw[0], writer.raw[0])


def test_a_write_outside_its_blocks_is_refused_and_the_connection_goes_on(name: str) -> None:
    writer, reader = (make_store(MODEL, 4, 16, tokens_last=True) for _ in range(2))
    here = [[0, 1, 2], [0, 1, 2]]
    fill(writer, MODEL, here, 12)
    said: list[str] = []
    with engines(name, [writer], [reader]) as ([sender], [receiver]):
        ticket = receiver.open(1, 1, [[3, 4, 5], [3, 4, 5]], [0, 0], 12, lambda a, b: None, said.append)
        for table in ([3, 4, 6], [3, 4, 99], [0, 1, 2]):
            with pytest.raises(KVTransferError, match="outside the blocks"):
                sender.send({**ticket, "tables": [table, table]}, here, 0, 12)
        with pytest.raises(KVTransferError, match="not those of this transfer"):
            sender.send(ticket, [[0, 1, 2, 3], [0, 1, 2, 3]], 13, 14)
        assert said and (reader.raw[0][6] == -7.0).all()
        sender.send(ticket, here, 0, 12)
        assert torch.equal(reader.raw[0][3:6], writer.raw[0][:3])


def test_who_cannot_be_understood_is_refused_by_name(name: str) -> None:
    reader = make_store(MODEL, 4, 8, tokens_last=True)
    receiver = KVReceiver(reader, SECRET, [name])
    try:
        address = receiver.address()
        with pytest.raises(KVTransferError):
            KVSender(reader, [address], b"another secret", transports=[name])
        other = make_store(Model(4, 4, (None, 8, None)), 4, 8, tokens_last=True)
        with pytest.raises(KVMismatchError, match="another model"):
            KVSender(other, [address], SECRET, transports=[name])
        # The receiver refuses by itself, whatever the sender believes.
        with pytest.raises(KVMismatchError, match="another model") as refused:
            KVSender(other, [{**address, "layout": other.layout.to_data()}], SECRET, transports=[name])
        assert refused.value.field == "model"
        KVSender(reader, [address], SECRET, transports=[name]).close()
    finally:
        receiver.stop()
    with pytest.raises(PeerLostError):
        KVSender(reader, [address], SECRET, transports=[name], timeout=5.0)


def test_closing_waits_for_what_is_being_copied_in(name: str) -> None:
    """`close` from another thread returns only after the arrival that is under way."""
    writer, reader = (make_store(MODEL, 4, 16, tokens_last=True) for _ in range(2))
    tables = tables_for(writer, 12, 1)
    inside, go_on, order = threading.Event(), threading.Event(), []

    def arrived(start: int, end: int) -> None:
        inside.set()
        assert go_on.wait(60)
        order.append("arrived")

    with engines(name, [writer], [reader]) as ([sender], [receiver]):
        ticket = receiver.open(1, 1, tables, [0, 0], 12, arrived)
        sending = threading.Thread(target=sender.send, args=(ticket, tables, 0, 12))
        sending.start()
        assert inside.wait(60)
        closing = threading.Thread(target=lambda: (receiver.close(1), order.append("closed")))
        closing.start()
        go_on.set()
        closing.join(60)
        sending.join(60)
    assert order == ["arrived", "closed"]


def test_a_blocked_send_can_be_aborted(name: str) -> None:
    writer, reader = (make_store(MODEL, 4, 16, tokens_last=True) for _ in range(2))
    tables = tables_for(writer, 12, 1)
    inside, go_on = threading.Event(), threading.Event()
    failed: list[Exception] = []

    def arrived(start: int, end: int) -> None:
        inside.set()
        assert go_on.wait(60)

    with engines(name, [writer], [reader]) as ([sender], [receiver]):
        ticket = receiver.open(1, 1, tables, [0, 0], 12, arrived)

        def send() -> None:
            try:
                sender.send(ticket, tables, 0, 12)
            except KVTransferError as error:
                failed.append(error)

        sending = threading.Thread(target=send)
        sending.start()
        assert inside.wait(60)
        sender.abort()
        sending.join(60)
        go_on.set()
        assert [type(error) for error in failed] == [PeerLostError]
        with pytest.raises(PeerLostError):
            sender.send(ticket, tables, 0, 12)
