"""What the machine is and what it can do at most: the ceilings that shares of the limit refer to."""

from __future__ import annotations

import ctypes.util
import itertools
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this machine, now: bytes read per second, fp32 multiply-adds per second (counted as two)."""

    read_bytes_per_s: float
    flops_per_s: float

    def or_higher(self, other: Ceilings) -> Ceilings:
        """The best that was seen of each."""
        return Ceilings(max(self.read_bytes_per_s, other.read_bytes_per_s), max(self.flops_per_s, other.flops_per_s))


def measure_ceilings(seconds: float = 0.5) -> Ceilings:
    """Best of many reads of a large array's pieces, each of which has left the caches by its next turn, and of many
    matrix products. Other work, or two cores that are hardware threads of one, may slow all threads together more than
    one alone. So bandwidth is the better of the two, and the rate at least that of one thread times the threads."""
    import torch

    pieces = torch.ones(1 << 27).split(1 << 24)
    turns = itertools.cycle(pieces)
    left, right = torch.randn(256, 1024), torch.randn(1024, 1024)
    threads = torch.get_num_threads()
    read = product = float("inf")
    try:
        for used in dict.fromkeys((threads, 1)):
            torch.set_num_threads(used)
            read = min(read, _best(lambda: next(turns).sum(), seconds))
            product = min(product, _best(lambda: left @ right, seconds) * used / threads)
    finally:
        torch.set_num_threads(threads)
    return Ceilings(pieces[0].nbytes / read, 2 * 256 * 1024 * 1024 / product)


def _best(action: Any, seconds: float) -> float:
    action()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def describe_machine() -> dict[str, Any]:
    """Processor, cores and commit: what a figure must be read with."""
    model = ""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "CPU part")):
            model = line.split(":", 1)[1].strip()
            break
    return {"machine": platform.machine(), "cpu": model or platform.processor(), "cores": usable_cores(),
            "commit": _commit()}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, timeout=10,
                               capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def rdma_devices(folder: str = "/sys/class/infiniband") -> list[str]:
    """Network devices that can read and write another machine's memory, with the state of their ports."""
    found = []
    for device in sorted(_entries(folder)):
        states = [_read(f"{port}/state").strip() or "unknown" for port in sorted(_entries(f"{device}/ports"))]
        found.append(f"{Path(device).name} ({', '.join(states) or 'no ports'})")
    return found


def rdma_report() -> str:
    """The RDMA devices of this machine, or what is missing."""
    found = rdma_devices()
    if found:
        return ", ".join(found)
    if ctypes.util.find_library("ibverbs") is None:
        return "none: no device in /sys/class/infiniband, and no libibverbs (apt-get install libibverbs1 librdmacm1)"
    return "none: no device in /sys/class/infiniband (libibverbs is there)"


def _entries(folder: str) -> list[str]:
    try:
        return [str(each) for each in Path(folder).iterdir()]
    except OSError:
        return []


def peak_memory_bytes() -> int:
    """Most resident memory this process ever had. The system's own count (`getrusage`) would begin with what its parent
    had when it started this one."""
    import resource

    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
