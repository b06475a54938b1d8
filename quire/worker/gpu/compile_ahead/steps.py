"""The steps of a start, launched by the engine's own code over tensors without memory: what they ask the compilers for
is what the engine will ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.config import CacheConfig
from quire.models.registry import family_of, read_spec
from quire.worker.gpu.compile_ahead.shapes import ShapesOnly
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.worker import GpuWorker

_BLOCKS = 1 << 10
"""Of the pool. How many there are changes no kernel."""


def launch_steps(config: Mapping[str, Any], options: DeviceOptions, block_size: int) -> None:
    """All steps that a start runs or captures."""
    shorter = _few_layers(config)
    cache = CacheConfig(block_size=block_size, num_kv_blocks=_BLOCKS)
    eager = dataclasses.replace(options, enforce_eager=True)
    with ShapesOnly():
        worker = GpuWorker(shorter, _weights(shorter, torch.device(options.device)), cache, eager)
        try:
            with torch.inference_mode():
                worker.launch_captured()
        finally:
            worker.close()


def _few_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with two layers, where all are alike: the first adds no residual, the others are as the second."""
    shorter = {**config, "num_hidden_layers": 2}
    alike = len(set(read_spec(config).layers)) == 1
    return shorter if alike and set(read_spec(shorter).layers) == set(read_spec(config).layers) else config


def _weights(config: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    spec, names = read_spec(config), family_of(config).names
    for name, shape in names.stored(spec).items():
        matrix = len(shape) > 1
        yield name, torch.empty(shape, dtype=torch.bfloat16 if matrix else torch.float32, device=device)
