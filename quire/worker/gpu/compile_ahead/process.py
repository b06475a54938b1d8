"""A process that compiles its share of a start's kernels into Triton's cache on disk, and ends:
`python -m quire.worker.gpu.compile_ahead.process PARENT_PID SHARE SHARES THREADS`, with a `CompileRequest` as input.
Until that comes it imports what it will need; if none comes, it ends.

It sees no GPU. Whatever goes wrong costs nothing but its own work: the engine compiles what it does not find.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from quire.child import end_with_parent


def main(argv: list[str]) -> int:
    parent, share, shares, threads = map(int, argv)
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine ends it
    with ThreadPoolExecutor(1) as reader:  # whoever writes a long one does not wait for the imports
        return compile_share(reader.submit(sys.stdin.read).result, share, shares, threads)


def compile_share(told: Callable[[], str], share: int, shares: int, threads: int) -> int:
    """How many kernels of the share could not be compiled. `told` waits for the request."""
    from quire.worker.gpu.compile_ahead.no_chip import Work, pretend
    from quire.worker.gpu.compile_ahead.request import CompileRequest
    from quire.worker.gpu.compile_ahead.steps import launch_steps

    text = told()
    if not text:
        return 0
    request = CompileRequest.read(text)
    with ThreadPoolExecutor(threads) as executor:
        work = Work(executor, share, shares, finish=_compile_launcher)
        pretend(request.chip, work)
        with work:
            launch_steps(request.config, request.options, request.block_size)
        return min(work.failures(), 100)


def _compile_launcher(kernel: Any) -> None:
    """The C function that launches a kernel: Triton compiles it with the system's compiler, and keeps it too. That
    needs the driver's library, not a GPU."""
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
