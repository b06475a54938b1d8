"""Prints what a start asks the compilers for, as JSON: a script, since it changes torch and Triton for good.

Its input is a `CompileRequest`. Each kernel of Triton's by its name and by where it is kept once it is compiled; of
those in CUDA C, how many.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from quire.worker.gpu.compile_ahead.no_chip import Work, pretend
from quire.worker.gpu.compile_ahead.request import CompileRequest
from quire.worker.gpu.compile_ahead.steps import launch_steps


class _Nobody:
    def submit(self, *_: Any) -> None:
        """Compiles nothing."""


class _Asked(Work):
    """Writes down whatever is asked for."""

    def __init__(self) -> None:
        super().__init__(_Nobody(), 0, 1, lambda kernel: None)  # type: ignore[arg-type]
        self.names: dict[str, str] = {}

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        source = next(cell.cell_contents for cell in compile_fn.__closure__ or ()
                      if hasattr(cell.cell_contents, "fn"))
        self.names[hashlib.sha256(key.encode()).hexdigest()] = source.fn.__name__
        return super().submit(key, compile_fn, finalize_fn)


def main() -> None:
    request, work = CompileRequest.read(sys.stdin.read()), _Asked()
    pretend(request.chip, work)
    with work:
        launch_steps(request.config, request.options, request.block_size)
    print(json.dumps({"triton": work.names, "cuda": len(work.asked) - len(work.names)}))


if __name__ == "__main__":
    main()
