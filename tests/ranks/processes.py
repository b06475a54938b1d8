"""What tests of ranks look at from outside: processes and memory that must not be left behind."""

from __future__ import annotations

import os
import time

from quire.bench.soak.rank_processes import alive as alive
from quire.bench.soak.rank_processes import children as children
from quire.bench.soak.rank_processes import ranks_of as ranks_of

PATIENCE = 60.0
"""Seconds after which a test counts as hanging, on a machine where everything is slow."""


def until_gone(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def named_memory() -> set[str]:
    """What lies in /dev/shm of ours."""
    return {name for name in os.listdir("/dev/shm") if "quire" in name}
