"""The processes of a server's engines and of their ranks, found from outside: for those who kill or measure them."""

from __future__ import annotations

import os
from pathlib import Path


def _status(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent and more; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Does the process run? One that has ended and was not waited for does not."""
    status = _status(pid)
    return bool(status) and status[0] not in "ZX"


def children(pid: int) -> list[int]:
    """Of a process, of any depth, and alive."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _status(int(entry))):
            parents[int(entry)] = int(status[1])
    found, queue = list[int](), [pid]
    while queue:
        at = queue.pop()
        own = [child for child, parent in parents.items() if parent == at]
        found += own
        queue += own
    return [child for child in found if alive(child)]


def ranks_of(pid: int) -> list[int]:
    """Its children that are ranks, in the order of their start."""
    return _running(pid, b"quire.ranks.process")


def engines_of(pid: int) -> list[int]:
    """The engines among a server's processes."""
    return _running(pid, b"quire.engine.process.main")


def _running(pid: int, module: bytes) -> list[int]:
    found = []
    for child in children(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if module in command:
            found.append(child)
    return sorted(found)
