"""The `quire` command: runs what is asked for, and turns every failure into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from quire.cli.commands import UsageError, dispatch
from quire.errors import QuireError

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (failed), 2 (wrong usage) or 130 (Ctrl-C)."""
    words = list(sys.argv[1:] if argv is None else argv)
    verbose = "-v" in words or "--verbose" in words
    _print_whatever_the_locale()
    try:
        status = _run(words)
        sys.stdout.flush()  # here, where a reader that has gone away can still be handled
        return status
    except SystemExit as stop:  # argparse, after it has printed the help
        return stop.code if isinstance(stop.code, int) else FAILED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        _say("")
        return INTERRUPTED
    except UsageError as error:
        _say(f"quire: error: {error}")
        return USAGE
    except QuireError as error:
        _fail(_one_line(str(error)), verbose)
    except Exception as error:
        hint = "" if verbose else " (a bug, or a broken installation: run with --verbose for the traceback)"
        _fail(f"unexpected {type(error).__name__}: {_one_line(str(error))}{hint}", verbose)
    return FAILED


def _run(words: list[str]) -> int:
    found = dispatch(words)
    if isinstance(found, str):
        print(found)
        return 0
    module, args = found
    status: int = module.run(args)
    return status


def _one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _fail(message: str, verbose: bool) -> None:
    """One line; with --verbose the traceback before it."""
    if verbose:
        import traceback

        traceback.print_exc()
    _say(f"quire: error: {message}")


def _say(text: str) -> None:
    try:
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _drop_output()


def _drop_output() -> None:
    """The reader of our output has gone: drop what is buffered, so that it does not fail again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(nowhere, stream.fileno())


def _print_whatever_the_locale() -> None:
    """A model writes any character; a terminal that cannot show one shows a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    raise SystemExit(main())
