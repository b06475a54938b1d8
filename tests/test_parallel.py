"""The runner of `make test-gpu`: every test once, whatever the processes go through, and the right exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("parallel.py")


def run(folder: Path, *args: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(SCRIPT), "-n", "2", *args], cwd=folder, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def log(folder: Path) -> list[str]:
    return sorted((folder / "log").read_text().split())


HEAD = """
import os, pathlib, pytest
def note(name):
    with open(pathlib.Path(__file__).parent / "log", "a") as file:
        file.write(name + "\\n")
"""


def test_all_pass_once_and_alone_means_after_the_others(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(HEAD + """
@pytest.mark.parametrize("i", range(40))
def test_one(i):
    note(f"many{i}")

@pytest.mark.skip(reason="no such device")
def test_skipped():
    pass
""")
    (tmp_path / "test_shared.py").write_text(HEAD + """
@pytest.fixture(scope="module")
def costly():
    note("costly")

@pytest.mark.parametrize("i", range(6))
def test_shared(costly, i):
    note(f"shared{i}")
""")
    (tmp_path / "test_alone.py").write_text(HEAD + """
def test_alone():
    note("alone" if len((pathlib.Path(__file__).parent / "log").read_text().split()) == 47 else "early")
""")
    code, shown = run(tmp_path, "--alone", "test_alone.py", ".")
    assert code == 0, shown
    assert log(tmp_path) == sorted(["costly", "alone", *(f"many{i}" for i in range(40)),
                                    *(f"shared{i}" for i in range(6))])  # fmt: skip
    assert "47 passed, 0 failed, 1 skipped" in shown and "no such device" in shown and "slowest" in shown


def test_the_paths_named_first_start_first(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(HEAD + f"def test_it():\n    note('{name}')\n")
    assert run(tmp_path, "-n", "1", "test_c.py", "test_b.py", ".")[0] == 0
    assert (tmp_path / "log").read_text().split() == ["c", "b", "a"]


def test_failures_and_lost_processes_fail_their_test_only(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(HEAD + """
@pytest.mark.parametrize("i", range(20))
def test_one(i):
    note(f"some{i}")
    if i == 3:
        os._exit(7)
    if i == 5:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert i != 11, "eleven"
""")
    code, shown = run(tmp_path, ".")
    assert code == 1
    assert log(tmp_path) == sorted(f"some{i}" for i in range(20))
    assert "17 passed, 3 failed" in shown and "eleven" in shown and "ended with 7" in shown


def test_what_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test_good():\n    pass\n")
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    code, shown = run(tmp_path, ".")
    assert code == 1 and "nothing_of_that_name" in shown
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(tmp_path, "empty")[0] == 1


def test_a_test_that_hangs_has_failed_and_shows_where(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(HEAD + """
import time

def test_hangs():
    time.sleep(200)  # here

def test_other():
    note("other")
""")
    code, shown = run(tmp_path, "--longest", "2", "test_some.py")
    assert code == 1 and log(tmp_path) == ["other"]
    assert "FAILED test_some.py::test_hangs" in shown and "in test_hangs" in shown and "1 passed, 1 failed" in shown
