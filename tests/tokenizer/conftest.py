"""The vocabularies and chat templates inside the llama-cpp-python sdist, fetched once into the cache."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from quire.config import default_cache_dir

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
INSIDE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/models/"


def _download(folder: Path) -> Path:
    """Only the sdist; pip asks its build system for metadata but builds nothing."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--retries", "1", "--no-binary", "llama-cpp-python", "--dest", str(folder)]
    command += [f"llama-cpp-python=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"pip cannot fetch the llama-cpp-python sdist here: {done.stderr.strip()[-300:]}")
    path = folder / f"llama_cpp_python-{VERSION}.tar.gz"
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return path


def _extract(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.startswith(INSIDE):
                member.name = member.name.removeprefix(INSIDE)
                tar.extract(member, target, filter="data")


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """llama.cpp's models/ folder: ggml-vocab-*.gguf with .inp and .out, templates/*.jinja."""
    target = default_cache_dir() / "tests" / f"llama-cpp-models-{VERSION}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of pytest-xdist's workers fetches, the others wait
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _extract(_download(Path(scratch)), Path(scratch) / "models")
                (Path(scratch) / "models").rename(target)
    return target
