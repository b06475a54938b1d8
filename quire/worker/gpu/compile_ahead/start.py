"""Starts the processes that compile a start's kernels, waits for them, and leaves none behind.

They work while the engine loads weights. Nothing depends on them: the engine takes what it finds in Triton's cache and
compiles the rest, as it does where none was started.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from quire.child import child_environment, module_command
from quire.worker.gpu.compile_ahead.request import Chip, CompileRequest
from quire.worker.gpu.options import DeviceOptions

_KNOWN_CHIP = (9, 0)
_KNOWN_TRITON = "3.6."
"""Both are those of the measurements: others compile as they go."""
_LEAST_CORES = 8
_CORES_OF_A_PROCESS = 4
"""Threads of each: a kernel takes Python's lock for a seventh of its time. On 16 cores of an H200's host all kernels
took 12.4 s with 8 threads, 10.9 s with 4."""
_MOST_PROCESSES = 4
"""Each imports torch, and asks for all kernels to compile its share: more of them than that were no faster."""
_PATIENCE = 60.0
"""Seconds from the start of the processes after which they are ended."""
_log = logging.getLogger(__name__)


class CompileAhead:
    """Processes under way. The thread that makes it must live until it is closed."""

    def __init__(self, request: CompileRequest, shares: int, threads: int, marker: Path) -> None:
        """`marker`: a file that is made when all have ended well."""
        self._marker = marker
        self._until = time.monotonic() + _PATIENCE
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files = ExitStack()
        self._said: list[IO[bytes]] = []
        """What each of them says to its errors."""
        try:
            for share in range(shares):
                self._begin(request.text(), share, shares, threads)
        except BaseException:
            self.close()
            raise

    def _begin(self, text: str, *numbers: int) -> None:
        said = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._said.append(said)
        with tempfile.TemporaryFile() as given:
            given.write(text.encode())
            given.seek(0)
            self._processes.append(subprocess.Popen(
                module_command("quire.worker.gpu.compile_ahead.process", str(os.getpid()), *map(str, numbers)),
                stdin=given, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
                env=child_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Until all have ended, or have taken too long."""
        codes = []
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._until - time.monotonic()))
            codes.append(process.returncode)
        if self._processes and not any(code != 0 for code in codes):
            with suppress(OSError):
                self._marker.touch()
        elif self._processes:
            _log.info("kernels were not compiled ahead (%s): they are compiled as they are needed", self._why(codes))
        self.close()

    def _why(self, codes: list[int | None]) -> str:
        for code, said in zip(codes, self._said, strict=True):
            if code != 0:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                return "it took too long" if code is None else lines[-1] if lines else f"exit code {code}"
        return ""

    def close(self) -> None:
        """End what is left, with its compilers. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._files.close()
        self._processes, self._said = [], []


def compile_ahead(config: Mapping[str, Any], options: DeviceOptions, block_size: int) -> CompileAhead | None:
    """Begin to compile what a start of this model on this GPU needs; None where that is not worth it, or not known
    well enough: then everything is as it would be without."""
    try:
        return _begun(config, options, block_size)
    except Exception as error:
        _log.info("kernels are not compiled ahead (%s): they are compiled as they are needed", error)
        return None


def _begun(config: Mapping[str, Any], options: DeviceOptions, block_size: int) -> CompileAhead | None:
    import torch

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    triton = importlib.metadata.version("triton")
    if cores < _LEAST_CORES or options.enforce_eager or not triton.startswith(_KNOWN_TRITON):
        return None
    chip = chip_of(torch.cuda.get_device_properties(options.device))
    if chip.capability != _KNOWN_CHIP:
        return None
    request = CompileRequest(dict(config), options, block_size, chip)
    marker = _cache() / f"quire-{request.digest(triton, torch.__version__, sys.version)}"
    if marker.exists() or not _writable(marker):
        return None
    return CompileAhead(request, min(_MOST_PROCESSES, cores // _CORES_OF_A_PROCESS), _CORES_OF_A_PROCESS, marker)


def chip_of(found: Any) -> Chip:
    """What torch says of a device."""
    return Chip((found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin)


def _cache() -> Path:
    """Triton's own, so that whoever deletes it deletes the marker."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _writable(marker: Path) -> bool:
    marker.parent.mkdir(parents=True, exist_ok=True)
    return os.access(marker.parent, os.W_OK)
