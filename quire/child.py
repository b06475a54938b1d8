"""Starts Python programs in processes of their own that find no package in the current directory.

`python -m` puts the current directory first on the path of imports: a `torch.py` that lies where `quire serve` is
started would be run by its engine. Every child is started without that (`-P`), and what a child runs of Quire comes
from the very folder that this file lies in, wherever else there is a `quire`.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package; use it with `child_environment`."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), module, *arguments]


def installed_command(module: str) -> list[str]:
    """The command that runs a module of another package, as it is installed."""
    return [sys.executable, "-P", "-m", module]


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child. Children of the child are started safely too."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    path = os.environ.get("PYTHONPATH")
    if path is not None:
        # An empty entry, as `PYTHONPATH=$PYTHONPATH:/more` leaves it, stands for the current directory.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path.split(os.pathsep)))
    return environment | changes


def end_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends: also when it is stopped and hears nothing."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def explain_exit(code: int) -> str:
    """What ended a child, from its exit code."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def leave_current_directory() -> None:
    """For a program that was started as `python -m`: take the current directory off the path again."""
    if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0] or ".") == os.path.realpath("."):
        del sys.path[0]


def _take_this_package() -> None:
    """`quire` is the package around this file, whatever the path would find."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location("quire", folder / "__init__.py",
                                                  submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    sys.modules["quire"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def _main() -> None:
    module, *arguments = sys.argv[1:]
    _take_this_package()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
