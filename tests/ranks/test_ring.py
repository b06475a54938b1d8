"""A ring in shared memory: every reader gets every message whole and in order, whatever their sizes and speeds."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import EngineDeadError
from quire.ranks.ring import RingReader, RingWriter, ring_bytes
from quire.ranks.shared_memory import SharedMemory


def ring(num_readers: int, capacity: int) -> tuple[RingWriter, list[RingReader], SharedMemory]:
    memory = SharedMemory.create("test", ring_bytes(num_readers, capacity))
    readers = [RingReader(memory, i, num_readers, spin_seconds=0.0) for i in range(num_readers)]
    return RingWriter(memory, num_readers), readers, memory


def nothing() -> None:
    pass


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(1, 3))
def test_messages_around_the_end_of_the_ring_arrive_whole(messages: list[bytes], num_readers: int) -> None:
    writer, readers, memory = ring(num_readers, 192)
    for message in messages:
        writer.write(message, nothing)
        assert [reader.read(1.0) for reader in readers] == [message] * num_readers
    assert readers[0].read(0.0) is None
    memory.close()


def test_readers_of_different_speed_get_everything_and_the_writer_waits_for_the_slowest() -> None:
    writer, readers, memory = ring(3, 4096)
    rng = random.Random(3)
    sent = [rng.randbytes(rng.choice([0, 1, 30, 900, 5000, 70_000])) for _ in range(200)]
    got: list[list[bytes]] = [[] for _ in readers]

    def read(index: int) -> None:
        while len(got[index]) < len(sent):
            message = readers[index].read(5.0)
            assert message is not None
            got[index].append(message)
            if index == 2 and len(message) == 30:
                time.sleep(0.001)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for message in sent:
        writer.write(message, nothing)
    for thread in threads:
        thread.join(60)
    assert got == [sent] * 3
    memory.close()


def test_a_writer_whose_reader_has_gone_gives_up_when_told() -> None:
    writer, _, memory = ring(1, 256)

    def check() -> None:
        raise EngineDeadError("rank 0 has gone")

    with pytest.raises(EngineDeadError, match="rank 0"):
        for _ in range(100):
            writer.write(b"x" * 20, check)
    memory.close()


def test_another_process_reads_what_is_written_after_it_fell_asleep() -> None:
    writer, (reader,), memory = ring(1, 4096)
    back, out = os.pipe()
    child = os.fork()
    if child == 0:
        ready = reader.read(30.0)
        os.write(out, ready or b"nothing")
        os._exit(0)
    time.sleep(0.05)
    writer.write(b"good morning", nothing)
    assert os.read(back, 100) == b"good morning"
    os.waitpid(child, 0)
    for fd in (back, out):
        os.close(fd)
    memory.close()


def test_a_reader_without_messages_uses_no_processor() -> None:
    _, (reader,), memory = ring(1, 4096)
    began = time.thread_time()
    assert reader.read(0.3) is None
    assert time.thread_time() - began < 0.03
    memory.close()


def test_a_reader_with_a_core_of_its_own_waits_there_and_may_leave_it_afterwards() -> None:
    memory = SharedMemory.create("test", ring_bytes(1, 192))
    allowed, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    reader = RingReader(memory, 0, 1, spin_seconds=0.0, core=core)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend((reader.read(30.0), os.sched_getaffinity(0))))
    thread.start()
    until = time.monotonic() + 20
    while os.sched_getaffinity(thread.native_id or 0) != {core} and time.monotonic() < until:
        time.sleep(0.001)
    assert os.sched_getaffinity(thread.native_id or 0) == {core}
    RingWriter(memory, 1).write(b"go", nothing)
    thread.join()
    assert found == [b"go", allowed]
    memory.close()


def test_a_reader_that_spins_goes_on_while_messages_are_announced_and_then_sleeps() -> None:
    memory = SharedMemory.create("test", ring_bytes(1, 192))
    reader, writer = RingReader(memory, 0, 1, spin_seconds=0.15), RingWriter(memory, 1, readers_spin=True)
    sleepers, slept = memoryview(memory.map)[12:16].cast("I"), []
    thread = threading.Thread(target=reader.read, args=(30.0,))
    thread.start()
    for _ in range(10):
        time.sleep(0.04)
        slept.append(sleepers[0])
        writer.announce()
    until = time.monotonic() + 20
    while not sleepers[0] and time.monotonic() < until:
        time.sleep(0.001)
    assert sum(slept) <= 2  # a machine may stop everything for a while
    assert sleepers[0] == 1
    writer.announce()
    writer.write(b"go", nothing)
    thread.join()
    assert sleepers[0] == 0
    del sleepers
    memory.close()


def test_a_reader_that_is_often_kept_off_its_core_sleeps_instead_of_spinning() -> None:
    memory = SharedMemory.create("test", ring_bytes(1, 4096))
    reader, writer = RingReader(memory, 0, 1, spin_seconds=60.0), RingWriter(memory, 1)
    sleepers = memoryview(memory.map)[12:16].cast("I")
    back, out = os.pipe()
    child = os.fork()
    if child == 0:
        while message := reader.read(60.0):
            os.write(out, message)
        os._exit(0)
    try:
        for late in range(20):
            time.sleep(0.02)
            if sleepers[0]:
                break
            os.kill(child, signal.SIGSTOP)
            os.waitpid(child, os.WUNTRACED)
            writer.write(b"%02d" % late, nothing)
            time.sleep(0.002)
            os.kill(child, signal.SIGCONT)
            assert os.read(back, 2) == b"%02d" % late
        assert 2 <= late < 20 and sleepers[0] == 1  # once or twice may be an accident
        naps, until = 0, time.monotonic() + 30
        while sleepers[0] and time.monotonic() < until:  # it tries again after a while
            writer.write(b"go", nothing)
            assert os.read(back, 2) == b"go"
            naps += 1
            for _ in range(40):  # busy machines take a while until it sleeps
                time.sleep(0.005)
                if sleepers[0]:
                    break
        assert naps > 50 and not sleepers[0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for fd in (back, out):
        os.close(fd)
    del sleepers
    memory.close()
