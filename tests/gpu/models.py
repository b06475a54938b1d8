"""Tiny models of every family with random weights, and engines over them, for tests on a GPU.

The path they are compared with is the CPU's own where its compiled kernels are there, else the same on CPU tensors
with plain torch operations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire.models.build import dummy_weights
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.worker.gpu.options import DeviceOptions
from tests.checkpoints import _BASE, FAMILY_NAMES
from tests.worker.gpu import engines

VOCAB = 97
__all__ = ["FAMILY_NAMES", "VOCAB", "config_of", "device_engine", "greedy", "host_engine", "host_ops", "smollm2_file",
           "weights_of"]


def config_of(family: str) -> dict[str, Any]:
    _, architecture, base = _BASE[family]
    return {**base, "architectures": [architecture]}


def weights_of(config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """As `dummy_weights`, with norms and biases random too: half the mistakes would not show otherwise."""
    generator = torch.Generator().manual_seed(3)
    for name, weight in dummy_weights(config):
        if weight.dim() == 1:
            weight = weight + 0.3 * torch.randn(weight.shape, generator=generator)
        yield name, weight


def device_engine(config: dict[str, Any], *, depth: int = 2, budget: int = 40, **options: Any) -> Any:
    """Keywords of `make_engine` (block_size, num_blocks, prefix_caching) and of `DeviceOptions`."""
    sizes = {name: options.pop(name) for name in ("block_size", "num_blocks", "prefix_caching") if name in options}
    settings = DeviceOptions(
        device="cuda", max_num_seqs=engines.SEQS, max_num_batched_tokens=budget, max_model_len=engines.MAX_LEN,
        **options,
    )
    return engines.make_engine(config, device=True, depth=depth, budget=budget, options=settings, **sizes)


def host_ops() -> Any:
    """The CPU's operations."""
    from quire.errors import QuireError
    from quire.ops.cpu import CpuOps
    from quire.ops.reference import TorchOps

    try:
        return CpuOps(num_threads=4)
    except (QuireError, OSError):
        return TorchOps()


def smollm2_file() -> Path | None:
    """The default model's file, if somebody has put it into the cache of this machine."""
    from quire.models.loader.catalog import CATALOG
    from quire.models.loader.pull import model_folder

    entry = CATALOG["smollm2-135m"]
    path = model_folder(entry.alias) / entry.file
    return path if path.is_file() and path.stat().st_size == entry.size else None


def host_engine(config: dict[str, Any], *, budget: int = 40) -> Any:
    settings = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=engines.SEQS,
                             max_num_batched_tokens=budget, max_model_len=engines.MAX_LEN)
    return engines.make_engine(config, device=True, budget=budget, options=settings, ops=host_ops())


def greedy(count: int, length: int = 24) -> list[Request]:
    """Requests that all start together and end together: the steps are the same however they overlap."""
    rng = random.Random(11)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=2)
    return [Request(f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randrange(3, 60))], params, i, 0.0)
            for i in range(count)]
