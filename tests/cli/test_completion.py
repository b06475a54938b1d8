"""Completion scripts: shells take them, and they know the commands, flags and values."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.commands import COMMANDS
from quire.cli.completion import tree
from tests.cli.conftest import Done


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory, quire: Callable[..., Done]) -> Path:
    path = tmp_path_factory.mktemp("completion") / "quire.bash"
    path.write_text(quire("completion", "bash").out)
    return path


def test_bash_takes_the_script(bash_script: Path) -> None:
    subprocess.run(["bash", "-n", str(bash_script)], check=True)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["gen"], ["generate"]),
        ([""], list(COMMANDS)),
        (["--ver"], ["--verbose", "--version"]),
        (["bench", "sch"], ["scheduler"]),
        (["-v", "bench", "cpu", "--cas"], ["--cases"]),
        (["generate", "--max-tok"], ["--max-tokens"]),
        (["generate", "--no-enable-p"], ["--no-enable-prefix-caching"]),
        (["generate", "--load-format", "d"], ["dummy"]),
        (["generate", "--model", "smol"], ["smollm2-135m"]),
        (["chat", "gem"], ["gemma3-270m"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["generate", "--file", ""], []),
    ],
)
def test_bash_completes(bash_script: Path, typed: list[str], expected: list[str]) -> None:
    program = (
        'source "$1"; shift; COMP_WORDS=(quire "$@"); COMP_CWORD=$#; _quire; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", program, "bash", str(bash_script), *typed], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(shell: str, inside: Callable[..., Done]) -> None:
    done = inside("completion", shell)
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)
    assert all(flag in done.out for flag in ("prefix-cach", "max-tokens", "smollm2-135m"))
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=done.out, text=True, check=True)


def test_the_tree_has_every_command_that_can_be_run() -> None:
    nodes = tree()
    assert {name for name in COMMANDS if name != "bench"} <= set(nodes)
    assert "bench cpu" in nodes and set(nodes[""].commands) == set(COMMANDS)
