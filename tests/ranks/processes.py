"""What tests of ranks look at from outside: processes and memory that must not be left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

PATIENCE = 60.0
"""Seconds after which a test counts as hanging, on a machine where everything is slow."""


def alive(pid: int) -> bool:
    """Does the process run? One that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Of a process, of any depth, and alive."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, queue = [], [pid]
    while queue:
        at = queue.pop()
        own = [child for child, parent in parents.items() if parent == at]
        found += own
        queue += own
    return [child for child in found if alive(child)]


def ranks_of(pid: int) -> list[int]:
    """Its children that are ranks, in the order of their start."""
    found = []
    for child in children(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"quire.ranks.process" in command:
            found.append(child)
    return sorted(found)


def until_gone(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def named_memory() -> set[str]:
    """What lies in /dev/shm of ours."""
    return {name for name in os.listdir("/dev/shm") if "quire" in name}
