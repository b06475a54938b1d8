"""A directory of units that outlives its engine: whole or not there, whatever happens in the middle of a write.

A unit is written under a temporary name and renamed when it is complete, so that killing the engine at any byte
leaves a file that nobody looks for. What a power cut, a bad sector or another program does to a file shows in its
checksum when it is read. The index is made anew from the names of the files at each start.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

from quire.errors import ConfigError
from quire.kvpool.directory_lock import DirectoryLock
from quire.kvpool.keys import KEY_BYTES
from quire.kvpool.store import StoreStats, UnitStore

log = logging.getLogger("quire.kvpool")
_NAME_LENGTH = 2 * (KEY_BYTES + 2)
_SHARD = 2
"""Characters of a name that choose its folder."""
_PATIENCE = 1.0
_MOST_PATIENCE = 60.0
"""Seconds without a write after one that failed; doubled for each further one, up to this."""


class DiskStore(UnitStore):
    """At most `capacity` bytes of units; those not used for longest make room."""

    instant = True

    def __init__(self, path: Path, capacity: int) -> None:
        self.path, self.capacity = path, capacity
        self.stats = StoreStats()
        self._mutex = Lock()
        self._index: OrderedDict[bytes, int] = OrderedDict()
        """Size of each file, least recently used first."""
        self._used = 0
        self._number = 0
        self._patience = 0.0
        self._no_write_before = 0.0
        try:
            for folder in (path, path / "units", path / "tmp"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = DirectoryLock(path)
            try:
                self._sweep()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise ConfigError(f"kv_disk {path} cannot be used: {error}", field="kv_disk") from error

    def _sweep(self) -> None:
        """Take stock: forget half-written files, and list the rest by when they were last used."""
        for torn in os.listdir(self.path / "tmp"):
            os.unlink(self.path / "tmp" / torn)
        found = sorted(self._files())
        for _, name, size in found:
            self._index[name] = size
        self._used = sum(self._index.values())
        for name in self._too_many(0):
            self._unlink(name)

    def _files(self) -> Iterator[tuple[float, bytes, int]]:
        """(time of last use, name, size) of every unit. What has another name is not ours and is left alone."""
        for shard in os.scandir(self.path / "units"):
            if not shard.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(shard.path):
                name = _name_of(entry.name)
                if name is not None and shard.name == entry.name[:_SHARD] and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, name, status.st_size

    # ---- units

    def find(self, names: Sequence[bytes]) -> list[bool]:
        with self._mutex:
            return [name in self._index for name in names]

    def read(self, name: bytes) -> bytearray | None:
        with self._mutex:
            size = self._index.get(name)
            if size is None:
                return None
            self._index.move_to_end(name)
        path = self._path(name)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:  # it is gone, or cannot be opened now: the next start finds it if it is there
            self._forget(name)
            if error.errno != errno.ENOENT:
                log.warning("the KV unit %s cannot be opened: %s", path, error)
            return None
        try:
            if os.fstat(handle).st_size != size:
                self.discard(name)
                return None
            content = _read_all(handle, size)
            with contextlib.suppress(OSError):
                os.utime(handle)
        except OSError as error:  # a bad sector: it would fail again and again
            log.warning("the KV unit %s cannot be read and is removed: %s", path, error)
            self.discard(name)
            return None
        finally:
            os.close(handle)
        self.stats.units_read += 1
        self.stats.bytes_read += len(content)
        return content

    def write(self, name: bytes, header: bytes, content: memoryview) -> bool:
        size = len(header) + len(content)
        if size > self.capacity or time.monotonic() < self._no_write_before:
            return False
        with self._mutex:
            if name in self._index:
                return True
            gone = self._too_many(size)
            self._number += 1
            temporary = self.path / "tmp" / f"{os.getpid()}-{self._number}"
        for old in gone:
            self._unlink(old)
        try:
            self._write_file(temporary, header, content)
            path = self._path(name)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._back_off(error)
            return False
        with self._mutex:
            self._index[name] = size
            self._used += size
        self._patience = 0.0
        self.stats.units_written += 1
        self.stats.bytes_written += size
        return True

    def _write_file(self, path: Path, header: bytes, content: memoryview) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for part in (memoryview(header), content):
                done = 0
                while done < len(part):
                    done += os.write(handle, part[done:])
        finally:
            os.close(handle)

    def _back_off(self, error: OSError) -> None:
        """A disk that is full, or gone, is left alone for a while. What is on it can still be read."""
        self.stats.writes_failed += 1
        self._patience = min(_MOST_PATIENCE, max(_PATIENCE, 2 * self._patience))
        self._no_write_before = time.monotonic() + self._patience
        what = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written: {error}"
        log.warning("the KV disk %s %s; nothing is written for %.0f s", self.path, what, self._patience)

    def discard(self, name: bytes) -> None:
        self._forget(name)
        self._unlink(name)

    # ---- bookkeeping

    def _too_many(self, wanted: int) -> list[bytes]:
        """Take out of the index, oldest first, what must go for `wanted` bytes more to fit."""
        gone = []
        while self._index and self._used + wanted > self.capacity:
            name, size = self._index.popitem(last=False)
            self._used -= size
            self.stats.units_evicted += 1
            gone.append(name)
        return gone

    def _forget(self, name: bytes) -> None:
        with self._mutex:
            self._used -= self._index.pop(name, 0)

    def _unlink(self, name: bytes) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self.path / "units" / text[:_SHARD] / text

    @property
    def num_units(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return self._used

    def clear(self) -> int:
        with self._mutex:
            gone = list(self._index)
            self._index.clear()
            self._used = 0
        for name in gone:
            self._unlink(name)
        return len(gone)

    def close(self) -> None:
        self._lock.release()


def _name_of(text: str) -> bytes | None:
    """The name of a unit from that of its file; None if it is not one."""
    if len(text) != _NAME_LENGTH:
        return None
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if name.hex() == text else None


def _read_all(handle: int, size: int) -> bytearray:
    """Up to `size` bytes; fewer where the file ends earlier, which its checksum will tell."""
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = os.readv(handle, [view[done:]])
        if count == 0:
            break
        done += count
    view.release()
    del content[done:]
    return content
