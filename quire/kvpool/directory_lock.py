"""One engine at a time in a directory: a lock that the system lets go of when the engine dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path
from threading import Lock

from quire.errors import ConfigError

_SECRET_BYTES = 32
_held: set[tuple[int, int] | None] = set()
"""Device and inode of lock files that this process holds: the system refuses only other processes."""
_mutex = Lock()


class DirectoryLock:
    """Held from the start until `release`, by this process and not by those it forks."""

    def __init__(self, path: Path) -> None:
        self._handle: int | None = None
        with _mutex:
            # A handle that we closed again would give up a lock that we hold already: they belong to processes.
            if _identity(path / "lock") in _held:
                raise _refusal(path, os.getpid())
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.read(handle, 20).decode("ascii", "replace").strip()
                os.close(handle)
                raise _refusal(path, owner or "unknown") from None
            self._handle = handle
            self._file = _identity(path / "lock")
            _held.add(self._file)
        with contextlib.suppress(OSError):  # a full disk: then the lock does not name its holder
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._handle is None:
            return
        with _mutex:
            os.close(self._handle)
            _held.discard(self._file)
        self._handle = None


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(file, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _refusal(path: Path, owner: object) -> ConfigError:
    return ConfigError(f"kv_disk {path} is in use by another engine (process {owner}): give each engine a directory of "
                       "its own", field="kv_disk")


def secret_in(path: Path) -> bytes:
    """The secret that a directory's units are named under, where the engine was given none; drawn once and kept."""
    try:
        return _kept_secret(path)
    except OSError as error:
        raise ConfigError(f"kv_disk {path} cannot keep its secret: {error}", field="kv_disk") from error


def _kept_secret(path: Path) -> bytes:
    file = path / "secret"
    try:
        known = file.read_bytes()
        if len(known) == _SECRET_BYTES:
            return known
    except FileNotFoundError:
        pass
    drawn = secrets.token_bytes(_SECRET_BYTES)
    temporary = path / f"secret.{os.getpid()}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.write(handle, drawn) < len(drawn):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(temporary, file)
    return drawn
