"""The directory of units: survives being killed at any byte, a full disk and foreign files; one engine at a time."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, KVUnitError
from quire.kvpool import disk
from quire.kvpool.directory_lock import secret_in
from quire.kvpool.disk import DiskStore
from quire.kvpool.keys import KEY_BYTES, unit_name
from quire.kvpool.unit import HEADER_BYTES, check, seal

SEED = 9


def name_of(number: int) -> bytes:
    return unit_name(number.to_bytes(KEY_BYTES, "big"), 0)


def content_of(number: int, size: int = 100) -> bytes:
    return random.Random(number).randbytes(size)


def put(store: DiskStore, number: int, size: int = 100) -> bool:
    content = content_of(number, size)
    return store.write(name_of(number), seal(name_of(number), content, SEED), memoryview(content))


def get(store: DiskStore, number: int) -> bytes | None:
    """What an engine would take for the unit."""
    unit = store.read(name_of(number))
    if unit is None:
        return None
    try:
        return bytes(check(name_of(number), unit, SEED))
    except KVUnitError:
        store.discard(name_of(number))
        return None


def file_of(folder: Path, number: int) -> Path:
    text = name_of(number).hex()
    return folder / "units" / text[:2] / text


def test_units_are_found_again_and_the_least_recently_used_make_room(tmp_path: Path) -> None:
    size = HEADER_BYTES + 100
    store = DiskStore(tmp_path, 3 * size)
    assert all(put(store, number) for number in (1, 2, 3))
    for number in (1, 2, 3):
        os.utime(file_of(tmp_path, number), (number, number))
    assert get(store, 1) == content_of(1)  # and it is the newest now
    store.close()
    store = DiskStore(tmp_path, 3 * size)
    assert store.num_units == 3 and store.num_bytes == 3 * size
    assert put(store, 4)
    assert store.find([name_of(number) for number in (1, 2, 3, 4)]) == [True, False, True, True]
    assert get(store, 2) is None and get(store, 1) == content_of(1) and not file_of(tmp_path, 2).exists()
    store.close()
    smaller = DiskStore(tmp_path, size)
    assert smaller.num_units == 1 and not put(smaller, 9, 5000)
    smaller.close()


def test_only_the_owner_may_read_what_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = DiskStore(folder, 10_000)
    put(store, 1)
    secret_in(folder)
    store.close()
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_secret_of_a_directory_is_drawn_once(tmp_path: Path) -> None:
    first = secret_in(tmp_path)
    assert len(first) == 32 and secret_in(tmp_path) == first


def test_a_directory_in_use_is_refused_here_and_in_another_process(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    with pytest.raises(ConfigError, match="in use") as caught:
        DiskStore(tmp_path, 10_000)
    assert caught.value.field == "kv_disk"
    program = ("import sys; from pathlib import Path; from quire.kvpool.disk import DiskStore\n"
               "try:\n    DiskStore(Path(sys.argv[1]), 10000)\nexcept Exception as error:\n    print(error)")
    said = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert f"in use by another engine (process {os.getpid()})" in said.stdout
    store.close()
    store.close()
    DiskStore(tmp_path, 10_000).close()
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskStore(Path("/proc/no-such-place"), 10_000)


@pytest.mark.parametrize("cut", range(0, HEADER_BYTES + 100, 7))
def test_a_file_that_was_cut_off_is_a_miss_and_goes_away(tmp_path: Path, cut: int) -> None:
    store = DiskStore(tmp_path, 10_000)
    put(store, 1)
    os.truncate(file_of(tmp_path, 1), cut)
    assert get(store, 1) is None and store.find([name_of(1)]) == [False] and not file_of(tmp_path, 1).exists()
    store.close()
    # The same where the file was cut while nobody looked, so that its size is what the index says.
    file_of(tmp_path, 1).write_bytes((seal(name_of(1), content_of(1), SEED) + content_of(1))[:cut])
    store = DiskStore(tmp_path, 10_000)
    assert get(store, 1) is None and put(store, 1) and get(store, 1) == content_of(1)
    store.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, HEADER_BYTES + 99), bit=st.integers(0, 7))
def test_a_flipped_bit_is_a_miss(tmp_path: Path, at: int, bit: int) -> None:
    store = DiskStore(tmp_path, 10_000)
    put(store, 1)
    store.close()
    damaged = bytearray(file_of(tmp_path, 1).read_bytes())
    damaged[at] ^= 1 << bit
    file_of(tmp_path, 1).write_bytes(damaged)
    store = DiskStore(tmp_path, 10_000)
    assert get(store, 1) in (None, content_of(1))  # two bytes of padding mean nothing
    store.clear()
    store.close()


def test_units_that_changed_places_are_misses(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10_000)
    put(store, 1)
    put(store, 2)
    one, two = file_of(tmp_path, 1).read_bytes(), file_of(tmp_path, 2).read_bytes()
    file_of(tmp_path, 1).write_bytes(two)
    file_of(tmp_path, 2).write_bytes(one)
    assert get(store, 1) is None and get(store, 2) is None
    store.close()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    DiskStore(tmp_path, 10_000).close()
    (tmp_path / "units" / "00").mkdir(exist_ok=True)
    strange = [tmp_path / "notes.txt", tmp_path / "units" / "readme", tmp_path / "units" / "00" / ("zz" * 34),
               tmp_path / "units" / "00" / ("AB" * 34), tmp_path / "units" / "00" / ("ab" * 34)]
    for path in strange:
        path.write_text("mine")
    link = file_of(tmp_path, 5)
    link.symlink_to(tmp_path / "notes.txt")
    (tmp_path / "tmp" / "123-4").write_text("half a unit")
    store = DiskStore(tmp_path, 10_000)
    assert store.num_units == 0 and get(store, 5) is None
    assert all(path.read_text() == "mine" for path in strange) and not list((tmp_path / "tmp").iterdir())
    store.close()


def test_a_full_disk_costs_the_write_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    store = DiskStore(tmp_path, 10_000)
    put(store, 1)
    written = [0]
    write = os.write

    def full(handle: int, data: memoryview) -> int:
        if written[0] >= 50:
            raise OSError(errno.ENOSPC, "no space left on device")
        written[0] += 30
        return write(handle, data[:30])

    monkeypatch.setattr(disk.os, "write", full)
    assert not put(store, 2) and store.stats.writes_failed == 1
    assert not list((tmp_path / "tmp").iterdir()) and not file_of(tmp_path, 2).exists()
    assert get(store, 1) == content_of(1)
    monkeypatch.setattr(disk.os, "write", write)
    assert not put(store, 2)  # it is left alone for a while
    now[0] += 1.5
    assert put(store, 2) and get(store, 2) == content_of(2)
    store.close()


@pytest.mark.parametrize("call", ["open", "readv"])
def test_a_unit_that_cannot_be_read_is_a_miss_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  call: str) -> None:
    store = DiskStore(tmp_path, 10_000)
    put(store, 1)

    def bad_sector(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, call, bad_sector)
        assert get(store, 1) is None
    assert store.find([name_of(1)]) == [False] and store.num_bytes == 0
    assert file_of(tmp_path, 1).exists() == (call == "open"), "one that cannot be opened may be well at the next start"
    assert put(store, 1) and get(store, 1) == content_of(1)
    store.close()


WRITER = """
import sys
from pathlib import Path
from tests.kvpool.test_disk import put
from quire.kvpool.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
number = 0
while True:
    put(store, number, 200_000)
    number += 1
    print(number, flush=True)
"""


def test_killed_in_the_middle_of_writing_it_has_whole_units_only(tmp_path: Path) -> None:
    """Seven engines, each killed after a few units, in the same directory."""
    rng = random.Random(4)
    known = 0
    for _ in range(7):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        wanted = known + rng.randrange(1, 20)
        for line in process.stdout:
            if line.strip().isdigit() and int(line) >= wanted:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = DiskStore(tmp_path, 1 << 30)
        assert store.num_units >= wanted and not list((tmp_path / "tmp").iterdir())
        assert all(get(store, number) == content_of(number, 200_000) for number in range(store.num_units))
        known = store.num_units
        store.close()


def _full(*args: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_on_a_full_disk_the_lock_is_taken_without_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = DiskStore(tmp_path, 10_000)
    assert put(first, 1)
    first.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _full)
        again = DiskStore(tmp_path, 10_000)
    assert get(again, 1) == content_of(1)
    again.close()


def test_a_start_that_fails_lets_go_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskStore(tmp_path, 10_000).close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", _full)
        with pytest.raises(ConfigError, match=r"cannot be used: .*No space left"):
            DiskStore(tmp_path, 10_000)
    DiskStore(tmp_path, 10_000).close()


def test_a_secret_that_cannot_be_kept_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: 3)
        with pytest.raises(ConfigError, match=r"cannot keep its secret: .*No space left"):
            secret_in(tmp_path)
    assert len(secret_in(tmp_path)) == 32 and secret_in(tmp_path) == secret_in(tmp_path)
