"""`quire bench cpu`: options that say nothing are refused by name, and the limit counts the bytes of the file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from quire.bench.cpu import command
from quire.bench.cpu.kernels import int8_rate
from quire.errors import QuireError
from tests.checkpoints import make_checkpoint
from tests.integer_checkpoints import AWQ, awq, write_checkpoint


def _parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize(("options", "message"), [
    (["--repeat", "0"], "--repeat must be at least 1, not 0"),
    (["--slices", "--threads", "1"], "--slices goes with neither --threads nor --quantization"),
    (["--sampling", "--quantization", "int8"], "--sampling goes with neither"),
    (["--kernels", "--threads", "2", "0"], "num_threads must be between 1 and 1024, not 0"),
    (["--threads", "1025"], "num_threads must be between 1 and 1024, not 1025"),
])  # fmt: skip
def test_an_option_without_sense_is_refused_by_its_name(options: list[str], message: str) -> None:
    with pytest.raises(QuireError, match=message):
        command.run(_parsed(*options))


def test_one_thing_is_measured_instead_of_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parsed("--python", "--kernels")
    assert "--kernels: not allowed with argument --python" in capsys.readouterr().err


def test_python_is_measured_with_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def child(module: str, *arguments: str) -> dict[str, Any]:
        asked.append(arguments[2:])
        return {}

    monkeypatch.setattr(command, "_child", child)
    command.run(_parsed("--python", "--threads", "1", "2", "--quantization", "int4"))
    assert asked == [(temperature, f'{{"quantization": "int4", "num_threads": {threads}}}')
                     for threads in (1, 2) for temperature in ("0.0", "0.8")]
    assert [f'"num_threads": {threads}' in line for threads, line in zip(
        (1, 1, 2, 2), capsys.readouterr().out.splitlines(), strict=True)] == [True] * 4


def test_what_a_file_stores_is_counted_in_its_own_bytes(tmp_path: Path) -> None:
    """Floats that `file` leaves alone are neither four bits nor integers."""
    write_checkpoint(tmp_path / "awq", awq(), AWQ)
    make_checkpoint(tmp_path / "floats")
    for name, quantization, rate in (("awq", "file", int8_rate()), ("awq", "int4", int8_rate()), ("floats", "file", 1)):
        shape = command._shape(str(tmp_path / name), quantization)
        size = (tmp_path / name / "model.safetensors").stat().st_size
        assert (shape["weight_bytes"], shape["int8_rate"]) == (size, rate)
    made = command._shape(str(tmp_path / "floats"), "int4")
    assert made["weight_bytes"] < size / 3 and made["int8_rate"] == int8_rate()
