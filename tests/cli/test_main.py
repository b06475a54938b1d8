"""Exit codes, one-line errors, help: what holds for every command."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.commands import COMMANDS, all_parsers, dispatch
from tests.cli.conftest import PATIENCE, Done, command, environment


def test_help_of_all_commands_is_printed_without_torch() -> None:
    program = (
        "import sys; from quire.cli.main import main\n"
        "codes = [main([]), main(['--help']), main(['bench']), main(['--version'])]\n"
        "codes += [main([*words.split(), '--help']) for words in sys.argv[1:]]\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *COMMANDS, "bench cpu"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_a_model_is_inspected_without_torch(tiny: Path) -> None:
    program = (
        "import sys; from quire.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]) or ('torch' if 'torch' in sys.modules else 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(tiny), "--load-format", "dummy"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "architecture" in done.stdout


def test_help_takes_less_than_three_tenths_of_a_second() -> None:
    def computing(argv: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(argv, capture_output=True, env=environment(), check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # CPU time beside that of a bare interpreter, and the best of several: other processes may be using the machine.
    bare = [sys.executable, "-c", ""]
    assert min(computing(command("--help")) - computing(bare) for _ in range(5)) < 0.3


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.children is None])
def test_help_shows_an_example_of_every_command(name: str, inside: Callable[..., Done]) -> None:
    done = inside(name, "--help")
    assert done.code == 0
    assert f"  quire {name}" in done.out and "examples:" in done.out
    assert done.out.startswith(f"usage: quire {name} [options]")


def test_bench_alone_lists_the_benchmarks(inside: Callable[..., Done]) -> None:
    done = inside("bench")
    assert done.code == 0
    assert all(f"\n  {name}" in done.out for name in ("cpu", "scheduler", "prefix-cache", "gpu"))


def test_train_alone_lists_what_can_be_trained(inside: Callable[..., Done]) -> None:
    assert "\n  eagle" in inside("train").out and "quire train eagle --out" in inside("train", "--help").out
    done = inside("train", "eagle", "--help")
    assert done.code == 0 and done.out.startswith("usage: quire train eagle [options]") and "examples:" in done.out


def test_a_broken_command_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, inside: Callable[..., Done], capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.cli import commands

    broken = commands.Command("quire.cli.not_there", "broken")
    monkeypatch.setitem(commands.BENCHES, "cpu", broken)
    done = inside("bench", "cpu")
    assert done.code == 1 and "quire bench cpu" in done.err and "not_there" in done.err
    assert inside("bench").code == 0
    assert "bench cpu" not in all_parsers()
    assert "bench cpu is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["geenrate"], "did you mean 'generate'?"),
        (["bench", "nonsense"], "'nonsense'"),
        (["--nonsense"], "--nonsense"),
        (["generate", "--nonsense", "x"], "--nonsense"),
        (["generate", "--max-tokens", "many", "x"], "whole number"),
        (["generate", "--logit-bias", "5", "x"], "token=bias"),
        (["generate", "--dtype", "int3", "x"], "--dtype"),
        (["generate"], "no prompt"),
        (["generate", "--json", "--stream", "x"], "--stream"),
        (["generate", "--system", "be brief", "x"], "--chat"),
        (["generate", "--raw", "--chat", "x"], "--raw"),
        (["pull"], "MODEL"),
        (["fuzz", "--cases", "3", "--seconds", "4"], "--cases"),
        (["completion", "tcsh"], "tcsh"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str], part: str, inside: Callable[..., Done]
) -> None:
    done = inside(*words)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("quire: error: ") and done.err.count("\n") == 1
    assert part in done.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate", "--model", "no-such-model", "x"], "no-such-model"),
        (["generate", "--block-size", "0", "x"], "block_size"),
        (["generate", "--temperature", "nan", "x"], "temperature"),
        (["generate", "--top-p", "2", "x"], "top_p"),
        (["generate", "--min-tokens", "9", "--max-tokens", "3", "x"], "min_tokens"),
        (["generate", "--file", "/no/such/file"], "/no/such/file"),
        (["inspect", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["pull", "no-such-model"], "smollm2-135m"),
        (["fuzz", "--replay", "{}"], "fuzz case"),
        (["chat", "no-such-model"], "no-such-model"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(
    words: list[str], part: str, inside: Callable[..., Done]
) -> None:
    done = inside(*words)
    assert done.code == 1 and done.out == ""
    assert done.err.startswith("quire: error: ") and done.err.count("\n") == 1
    assert part in done.err


@pytest.mark.parametrize("words", [["--verbose", "pull", "nothing"], ["pull", "nothing", "-v"]])
def test_verbose_shows_the_traceback(words: list[str], inside: Callable[..., Done]) -> None:
    done = inside(*words)
    assert done.code == 1
    assert done.err.startswith("Traceback") and done.err.splitlines()[-1].startswith("quire: error: ")


def test_an_unexpected_exception_is_one_line_that_names_its_type(
    monkeypatch: pytest.MonkeyPatch, inside: Callable[..., Done]
) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError("no\nreason")

    monkeypatch.setattr("quire.cli.models.run", fail)
    done = inside("models")
    assert done.code == 1 and done.err.count("\n") == 1
    assert "ZeroDivisionError: no reason" in done.err and "--verbose" in done.err
    assert "Traceback" in inside("models", "--verbose").err


def test_an_interrupt_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, inside: Callable[..., Done]
) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.cli.models.run", interrupt)
    done = inside("models")
    assert done.code == 130 and done.err.strip() == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        command("models"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(PATIENCE) == 141
    process.stderr.close()


def test_a_terminal_without_unicode_gets_question_marks(tiny: Path) -> None:
    done = subprocess.run(
        command("generate", "--help"),
        capture_output=True,
        env=environment() | {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"},
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.isascii()


def test_verbose_is_taken_before_and_after_the_command() -> None:
    for words in (["-v", "models"], ["models", "--verbose"]):
        found = dispatch(words)
        assert not isinstance(found, str) and found[1].verbose
