"""Who does not know the secret is told nothing, and messages that were changed on their way break the connection."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.ranks.frames import ConnectionLost, FrameSocket, Kind
from quire.ranks.secret import WrongSecret, greet, welcome


def met(ours: bytes, theirs: bytes) -> tuple[FrameSocket, FrameSocket, int, socket.socket]:
    engine, rank = socket.socketpair()
    with ThreadPoolExecutor(1) as thread:
        greeted = thread.submit(greet, rank, theirs, 3)
        try:
            index, sending, receiving = welcome(engine, ours)
        except WrongSecret:
            engine.close()
            with pytest.raises(WrongSecret):
                greeted.result(30)
            rank.close()
            raise
        seals = greeted.result(30)
    return FrameSocket(engine, sending, receiving), FrameSocket(rank, *seals), index, rank


def test_both_sides_prove_themselves_and_messages_pass_in_both_directions() -> None:
    engine, rank, index, _ = met(b"s" * 32, b"s" * 32)
    for number in range(3):
        engine.send(Kind.PLAN, b"plan %d" % number)
        rank.send(Kind.RESULT, b"result %d" % number)
        assert rank.receive() == (Kind.PLAN, b"plan %d" % number)
        assert engine.receive() == (Kind.RESULT, b"result %d" % number)
    assert index == 3
    engine.close()
    rank.close()


def test_another_secret_is_no_secret() -> None:
    with pytest.raises(WrongSecret):
        met(b"s" * 32, b"t" * 32)


def test_who_sends_byte_by_byte_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that know the secret wait behind it to be let in."""
    monkeypatch.setattr("quire.ranks.secret._HANDSHAKE_SECONDS", 0.4)
    engine, intruder = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.1):
            intruder.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(WrongSecret):
            welcome(engine, b"s" * 32)
        assert time.monotonic() - began < 1.2  # sixteen bytes of a nonce alone would take longer
    finally:
        over.set()
        thread.join()
        engine.close()
        intruder.close()


@pytest.mark.parametrize("harm", ["changed", "repeated", "unsealed"])
def test_a_message_that_was_tampered_with_breaks_the_connection(harm: str) -> None:
    engine, rank, _, raw = met(b"s" * 32, b"s" * 32)
    seen: list[bytes] = []

    class Tap:
        def sendall(self, data: bytes) -> None:
            seen.append(data)

    rank._socket = Tap()  # type: ignore[assignment]
    rank.send(Kind.RESULT, b"result")
    sent = {"changed": seen[0].replace(b"result", b"resold"), "repeated": seen[0] * 2, "unsealed": seen[0][:-16]}[harm]
    raw.sendall(sent + b"\0" * 16)
    with pytest.raises(ConnectionLost, match="seal"):
        for _ in range(3):
            engine.take()
    engine.close()
    raw.close()
