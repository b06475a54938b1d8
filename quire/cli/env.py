"""Prints what Quire runs on: versions, processor, memory, compiled kernels, folders, GPU, RDMA, KV transports."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

from quire import __version__
from quire.cli.terminal import size_text
from quire.config import default_cache_dir
from quire.errors import KernelBuildError
from quire.machine import describe_machine, rdma_report

EXAMPLES = "examples:\n  quire env\n  quire env --json"
_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "gguf",
    "huggingface_hub",
    "transformers",
    "triton",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    facts = gather()
    if args.json:
        print(json.dumps(facts))
        return 0
    memory = facts["memory"]
    shown = {
        **facts,
        "packages": ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        "memory": f"{size_text(memory['total'])}, {size_text(memory['available'])} available",
        "gpus": ", ".join(facts["gpus"]) or "none",
        "kv_transports": "; ".join(f"{name}: {state}" for name, state in facts["kv_transports"].items()),
    }
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"{name:<{width}}  {value}")
    return 0


def gather() -> dict[str, Any]:
    from quire.worker.memory import available_memory

    machine = describe_machine()
    return {
        "quire": f"{__version__} ({machine['commit']})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": _packages(),
        "system": f"{platform.system()} {platform.release()} {machine['machine']}",
        "processor": machine["cpu"],
        "cores": machine["cores"],
        "memory": {"total": _total_memory(), "available": available_memory()},
        "kernels": _kernels(),
        "cache_folder": str(default_cache_dir()),
        "gpus": _gpus(),
        "rdma": rdma_report(),
        "kv_transports": _transports(),
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _transports() -> dict[str, str]:
    """By what KV can travel to another engine here, and what is missing for the rest."""
    from quire.kvtransfer.transports import TRANSPORTS, transport

    return {name: transport(name).missing() or "usable" for name in TRANSPORTS}


def _total_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _kernels() -> str:
    """The variant that this processor gets, or what is wrong with it."""
    from quire.kernels.cpu import library

    try:
        handle = library.load()
    except KernelBuildError as error:
        return f"unusable: {error}"
    return Path(handle._name).name


def _gpus() -> list[str]:
    """Asks torch, which takes seconds to import, only where the system has a driver's device file."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return []
    try:
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:
        return [f"unusable: {type(error).__name__}: {error}"]
