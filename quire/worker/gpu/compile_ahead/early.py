"""Begins the processes that compile before the engine has imported torch, so that they import it at the same time.

What they will be told is not known yet, nor whether there is anything to compile: this is a guess from the outside of
the machine. Where it is wrong they are ended, having done nothing.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os

from quire.config import EngineConfig, kernel_cache
from quire.worker.gpu.compile_ahead.processes import Compilers, compilers_here

KNOWN_TRITON = "3.6."
"""That of the measurements: others compile as they go."""
MARKER = "quire-"
"""How files begin that say, in Triton's cache, what was compiled ahead."""
_DRIVER = "/dev/nvidiactl"
_log = logging.getLogger(__name__)


def begin_early(config: EngineConfig) -> Compilers | None:
    """Processes that wait to be told; None where nobody would tell them, as far as can be seen."""
    try:
        return compilers_here() if _asked(config) and _first_start() else None
    except Exception as error:
        _log.info("no process that compiles ahead was begun early: %s", error)
        return None


def _asked(config: EngineConfig) -> bool:
    model = config.model
    return (model.compile_ahead is not False and not model.enforce_eager and model.device != "cpu"
            and model.executor != "dummy" and not config.parallel.distributed)  # fmt: skip


def _first_start() -> bool:
    """On a machine with a GPU that has compiled nothing ahead yet."""
    return (os.path.exists(_DRIVER) and importlib.metadata.version("triton").startswith(KNOWN_TRITON)
            and not any(kernel_cache().glob(f"{MARKER}*")))  # fmt: skip
