"""Processes that compile: begun, told what, waited for, ended. None is left behind.

A process imports torch and Triton before it needs to know what to compile, so it can begin before that is known.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import IO

from quire.child import child_environment, module_command

_LEAST_CORES = 8
_CORES_OF_A_PROCESS = 4
"""Threads of each: a kernel takes Python's lock for a seventh of its time. On 16 cores of an H200's host all kernels
took 12.4 s with 8 threads, 10.9 s with 4."""
_MOST_PROCESSES = 4
"""Each imports torch, and asks for all kernels to compile its share: more of them than that were no faster."""


class Compilers:
    """Processes that wait to be told. The thread that makes them must live until they are closed."""

    def __init__(self, shares: int, threads: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files = ExitStack()
        self._said: list[IO[bytes]] = []
        """What each of them says to its errors."""
        try:
            for share in range(shares):
                self._begin(share, shares, threads)
        except BaseException:
            self.close()
            raise

    def _begin(self, *numbers: int) -> None:
        said = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._said.append(said)
        self._processes.append(subprocess.Popen(
            module_command("quire.worker.gpu.compile_ahead.process", str(os.getpid()), *map(str, numbers)),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            env=child_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, text: str) -> None:
        """What to compile. One that has ended hears nothing, and `wait` says so."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(text.encode())
            with suppress(BrokenPipeError):
                process.stdin.close()

    def wait(self, until: float) -> str | None:
        """Until all have ended, or the clock (`time.monotonic`) says so. Why not all of them did well; None: they
        did."""
        codes = []
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            codes.append(process.returncode)
        return self._why(codes) if any(code != 0 for code in codes) else None

    def _why(self, codes: list[int | None]) -> str:
        code, said = next((code, said) for code, said in zip(codes, self._said, strict=True) if code != 0)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        return "it took too long" if code is None else lines[-1] if lines else f"exit code {code}"

    def close(self) -> None:
        """End what is left, with its compilers. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        self._files.close()
        self._processes, self._said = [], []


def compilers_here() -> Compilers | None:
    """As many as this machine has cores for; None where they are too few."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    if cores < _LEAST_CORES:
        return None
    return Compilers(min(_MOST_PROCESSES, cores // _CORES_OF_A_PROCESS), _CORES_OF_A_PROCESS)
