"""From a sender's blocks into a receiver's, through every transport: exact, straight or by token, by any ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from quire.errors import ConfigError, KVMismatchError, KVTransferError
from quire.kvtransfer.layout import Span, first_read
from quire.kvtransfer.receiver import KVReceiver
from quire.kvtransfer.sender import KVSender
from quire.kvtransfer.store import KVStore
from quire.kvtransfer.transport.base import PeerLostError, StaleTransferError
from quire.kvtransfer.transport.mooncake import MooncakeWriter
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


def test_who_listens_everywhere_is_reached_where_it_is() -> None:
    store = make_store(MODEL, 4, 8, tokens_last=True)
    receiver = KVReceiver(store, SECRET, ["tcp"], host="0.0.0.0")
    try:
        with pytest.raises(PeerLostError, match="listens on all interfaces"):
            KVSender(store, [receiver.address()], SECRET, transports=["tcp"])
        KVSender(store, [receiver.address()], SECRET, transports=["tcp"], host="127.0.0.1").close()
    finally:
        receiver.stop()
    with pytest.raises(ConfigError, match="no KV transport can be used here"):
        KVReceiver(store, SECRET, [])
    with pytest.raises(KVTransferError, match="a secret"):
        KVReceiver(store, b"", ["tcp"])


def test_many_transfers_at_once_that_are_closed_at_any_time(name: str) -> None:
    """Every token that is said to have arrived is right; whoever gets the blocks of a closed transfer keeps them."""
    writer = make_store(MODEL, 4, 16, tokens_last=True)
    reader = make_store(MODEL, 4, 4 * 16, tokens_last=True)
    here = [list(range(10)), list(range(10))]
    fill(writer, MODEL, here, 38)
    problems: list[str] = []
    receiver = KVReceiver(reader, SECRET, [name])

    def play(lane: int) -> None:
        shuffle = random.Random(lane)
        sender = KVSender(writer, [receiver.address()], SECRET, transports=[name], timeout=60.0)
        for turn in range(12):
            there = [shuffle.sample(range(lane * 16, lane * 16 + 16), 10) for _ in range(2)]
            closes = shuffle.random() < 0.6
            done = threading.Event()
            came: list[int] = []
            ticket = receiver.open(lane, turn, there, [0, 0], 38, lambda a, b, came=came: came.extend(range(a, b)))

            def close(done: threading.Event = done) -> None:
                done.wait(shuffle.random() * 0.003)
                receiver.close(lane)

            closing = threading.Thread(target=close)
            if closes:
                closing.start()
            try:
                for first in range(0, 38, 13):
                    sender.send(ticket, here, first, min(38, first + 13))
            except StaleTransferError:
                assert closes
            if closes:
                closing.join(60)
            else:
                receiver.close(lane)
            if not closes and sorted(set(came)) != list(range(38)):
                problems.append(f"{lane}: {came}")
            wanted = expected(reader, MODEL, there, Span(0, 38, (0, 0)))
            for (layer, part), raw, right in zip(reader.layout.tensors(), reader.raw, wanted, strict=True):
                for token in came:
                    block, slot = there[layer.group][token // 4], token % 4
                    row = (block, ..., slot) if part.tokens_last else (block, slice(None), slot)
                    if not torch.equal(raw[row], right[row]):
                        problems.append(f"{lane}: token {token} of layer {layer.layer}")
                raw[lane * 16 : lane * 16 + 16] = float(lane)
            for raw in reader.raw:
                if not (raw[lane * 16 : lane * 16 + 16] == float(lane)).all():
                    problems.append(f"{lane}: written late")
        sender.close()

    lanes = [threading.Thread(target=play, args=(lane,)) for lane in range(4)]
    try:
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join(120)
        assert problems == [] and not any(lane.is_alive() for lane in lanes)
    finally:
        receiver.stop()


def test_what_a_stranger_writes_through_mooncake_does_not_count() -> None:
    """Its engine lets anybody write into registered memory: the sealed digest is what decides."""
    missing = transport("mooncake").missing()
    if missing is not None:
        pytest.skip(missing)
    writer, reader = (make_store(MODEL, 4, 16, tokens_last=True) for _ in range(2))
    fill(writer, MODEL, [[0, 1, 2], [0, 1, 2]], 12)
    came: list[tuple[int, int]] = []
    with engines("mooncake", [writer], [reader]) as ([sender], [receiver]):
        ticket = receiver.open(1, 1, [[3, 4, 5], [3, 4, 5]], [0, 0], 12, lambda a, b: came.append((a, b)))
        sender.send(ticket, [[0, 1, 2], [0, 1, 2]], 0, 12)
        assert came.pop() == (0, 12)
        inner = sender.writers[0]
        assert isinstance(inner, MooncakeWriter)
        whole = inner.write_bytes

        def disturbed(nbytes: int, deadline: float) -> None:
            whole(nbytes, deadline)
            inner.arena[nbytes // 2] ^= 1  # a stranger's write, by the way that is open to all
            whole(nbytes, deadline)

        inner.write_bytes = disturbed  # type: ignore[method-assign]
        with pytest.raises(PeerLostError):
            sender.send(ticket, [[0, 1, 2], [0, 1, 2]], 0, 12)
    assert came == []
