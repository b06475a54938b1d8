"""Tells processes to compile a start's kernels, and waits for them.

They work while the engine loads weights. Nothing depends on them: the engine takes what it finds in Triton's cache and
compiles the rest, as it does where none was started.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.worker.gpu.compile_ahead.early import KNOWN_TRITON, MARKER
from quire.worker.gpu.compile_ahead.processes import Compilers, compilers_here
from quire.worker.gpu.compile_ahead.request import Chip, CompileRequest
from quire.worker.gpu.options import DeviceOptions

_KNOWN_CHIP = (9, 0)
"""That of the measurements: others compile as they go."""
_PATIENCE = 60.0
"""Seconds from when the processes were told, after which they are ended."""
_log = logging.getLogger(__name__)


class CompileAhead:
    """Kernels under way, in processes that it closes."""

    def __init__(self, request: CompileRequest, compilers: Compilers, marker: Path) -> None:
        """`marker`: a file that is made when all have ended well."""
        self._compilers, self._marker = compilers, marker
        self._until = time.monotonic() + _PATIENCE
        compilers.tell(request.text())

    def wait(self) -> None:
        """Until all have ended, or have taken too long."""
        why = self._compilers.wait(self._until)
        if why is None:
            with suppress(OSError):
                self._marker.touch()
        else:
            _log.info("kernels were not compiled ahead (%s): they are compiled as they are needed", why)
        self.close()

    def close(self) -> None:
        """End what is left. Idempotent."""
        self._compilers.close()


def compile_ahead(config: Mapping[str, Any], options: DeviceOptions, block_size: int,
                  begun: Compilers | None = None) -> CompileAhead | None:
    """Begin to compile what a start of this model on this GPU needs; None where that is not worth it, or not known
    well enough: then everything is as it would be without. `begun`: processes that wait already; others are begun
    where there are none."""
    try:
        return _told(config, options, block_size, begun)
    except Exception as error:
        _log.info("kernels are not compiled ahead (%s): they are compiled as they are needed", error)
        return None


def _told(config: Mapping[str, Any], options: DeviceOptions, block_size: int,
          begun: Compilers | None) -> CompileAhead | None:
    import torch

    triton = importlib.metadata.version("triton")
    if options.enforce_eager or not triton.startswith(KNOWN_TRITON):
        return None
    chip = chip_of(torch.cuda.get_device_properties(options.device))
    if chip.capability != _KNOWN_CHIP:
        return None
    request = CompileRequest(dict(config), options, block_size, chip)
    marker = _cache() / f"{MARKER}{request.digest(triton, torch.__version__, sys.version)}"
    if marker.exists() or not _writable(marker):
        return None
    compilers = compilers_here() if begun is None else begun
    return None if compilers is None else CompileAhead(request, compilers, marker)


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
