"""Imports torch into a process of Quire's own without what only compilers of models need.

The import of torch ends with shape functions ("meta kernels") for thousands of operations, written in Python: a third
of the import's time and 18 MB of memory, for tracing, which we never do. Left out where no GPU is found, and only by
the commands and by processes that Quire starts: whoever uses `quire.LLM` in a program of their own has all of torch.
"""

from __future__ import annotations

import sys
from types import ModuleType

_LEFT_OUT = "torch._meta_registrations"


def import_torch() -> None:
    """Nothing, if torch is there already."""
    if "torch" in sys.modules:
        return
    sys.modules[_LEFT_OUT] = empty = ModuleType(_LEFT_OUT)
    try:
        import torch
    finally:
        del sys.modules[_LEFT_OUT]  # a later import finds the real one
    package, _, name = _LEFT_OUT.partition(".")
    if sys.modules[package].__dict__.get(name) is empty:
        delattr(sys.modules[package], name)
    if torch.cuda.is_available():  # libraries for GPUs may register operations that look for theirs
        __import__(_LEFT_OUT)
