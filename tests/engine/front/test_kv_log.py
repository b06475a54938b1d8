"""The log of what an engine holds: readers that come late, fall behind or go on all end up knowing the same."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.front import kv_log
from quire.engine.front.kv_log import Entry, JoinedKVLog, KVLog, names_of
from quire.engine.process import messages as m


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Reader:
    def __init__(self) -> None:
        self.epoch, self.sequence = "", 0
        self.held: set[bytes] = set()
        self.wholes = 0

    def read(self, log: KVLog) -> None:
        entries = log.since(self.epoch, self.sequence)
        if entries is None:
            self.epoch, self.sequence, self.held = log.epoch, log.sequence, set(log.held)
            self.wholes += 1
            return
        for entry in entries:
            assert entry.sequence == self.sequence + 1
            self.sequence = entry.sequence
            if entry.cleared:
                self.held.clear()
            self.held.difference_update(names_of(entry.evicted))
            self.held.update(names_of(entry.stored))


@given(st.lists(st.tuples(st.sampled_from(["store", "evict", "clear", "restart", "read", "read late"]),
                          st.integers(0, 30), st.integers(0, 12)), max_size=80))
def test_every_reader_ends_up_with_what_is_held(moves: list[tuple[str, int, int]]) -> None:
    async def main() -> None:
        log, often, rarely, held = KVLog(), Reader(), Reader(), set[bytes]()
        for move, first, count in moves:
            joined = [name(number) for number in range(first, first + count)]
            if move == "store":
                held.update(joined)
                log.take(m.KVChanges(b"".join(joined), b"", False))
            elif move == "evict":
                held.difference_update(joined)
                log.take(m.KVChanges(b"", b"".join(joined), False))
            elif move == "clear":
                held = set(joined)
                log.take(m.KVChanges(b"".join(joined), b"", True))
            elif move == "restart":
                held = set()
                log.start_over()
            elif move == "read":
                often.read(log)
            else:
                rarely.read(log)
            assert set(log.held) == held
        for reader in (often, rarely):
            reader.read(log)
            assert reader.held == held
            assert log.since(reader.epoch, reader.sequence) == []

    asyncio.run(main())


def test_the_log_is_bounded_and_who_falls_behind_starts_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(kv_log, "_MOST_NAMES", 50)
        log, reader = KVLog(), Reader()
        reader.read(log)
        for number in range(200):
            log.take(m.KVChanges(name(number), b"", False))
        assert log.since(log.epoch, log.sequence - 5) is not None
        assert log.since(reader.epoch, reader.sequence) is None
        reader.read(log)
        assert len(reader.held) == 200 and reader.wholes == 2
        assert log.since(log.epoch, log.sequence + 1) is None  # a place that never was

    asyncio.run(main())


def test_who_waits_is_woken() -> None:
    async def main() -> None:
        log = KVLog()
        waiting = asyncio.create_task(log.wait(60.0))
        await asyncio.sleep(0)
        log.take(m.KVChanges(name(1), b"", False))
        await asyncio.wait_for(waiting, 30.0)
        await log.wait(0.01)  # nothing new: it comes back all the same

    asyncio.run(main())


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 9), max_size=5),
                          st.lists(st.integers(0, 9), max_size=5)), max_size=40))
def test_engines_behind_one_server_hold_what_one_of_them_holds(changes: list[tuple[int, bool, list[int], list[int]]]
                                                               ) -> None:
    async def main() -> None:
        log, reader, held = JoinedKVLog(), Reader(), [set[int](), set[int](), set[int]()]
        reader.read(log)
        for number, cleared, evicted, stored in changes:
            held[number] = ((set() if cleared else held[number]) - set(evicted)) | set(stored)
            log.take_of(number, Entry(0, b"".join(map(name, stored)), b"".join(map(name, evicted)), cleared))
            reader.read(log)
            assert reader.held == set(log.held) == {name(each) for each in set().union(*held)}

    asyncio.run(main())
