"""A model's operations on a GPU, and the step's small kernels (table diffs, inputs, drawing), in torch where there is
none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from quire.errors import ConfigError
from quire.ops.interface import Ops
from quire.sampling.kernels import SamplingKernels
from quire.sampling.weights import use_kernels
from quire.worker.gpu.options import DeviceOptions


@dataclass(frozen=True, slots=True)
class StepKernels:
    """What the worker launches besides the model itself; signatures as in `quire.kernels.triton`."""

    scatter: Callable[..., None]
    gather_inputs: Callable[..., None]
    draw: Callable[..., None]
    draw_scratch: Callable[[int, int], Any]
    keep_features: Callable[..., None]
    fetch_features: Callable[..., None]
    walk_trees: Callable[..., None]
    follow_chains: Callable[..., None]
    grow: Callable[..., None]
    finish: Callable[..., None]
    """Of trees that grow on the device, as in `quire.kernels.growth`."""
    sampling: ModuleType | None = None
    """`kernels.triton.sample`; None: the full sampler does all that `draw` does not."""
    features: ModuleType | None = None
    """`kernels.triton.features`, which keeps projected states in one launch; None: they are projected, then kept."""


@functools.cache
def host_sampling(device: torch.device) -> SamplingKernels | None:
    """Where the tensors lie on a CPU: the kernels of the CPU's worker, so that both report the same bits."""
    if device.type != "cpu":
        return None
    from quire.kernels.cpu.sampling import CpuSampling

    return CpuSampling()


def step_kernels(device: torch.device) -> StepKernels:
    """Triton's on a GPU. On a CPU the references, written in `host_kernels` so that Triton need not be there."""
    if device.type == "cuda":
        from quire.kernels.triton import branch, chains, draw, features, growth, inputs, sample, weights

        use_kernels("cuda", weights)
        return StepKernels(
            inputs.scatter,
            inputs.gather_inputs,
            draw.draw,
            lambda rows, vocab: draw.DrawScratch.allocate(rows, vocab, device),
            features.keep_features,
            features.fetch_features,
            branch.walk_trees,
            chains.follow_chains,
            growth.grow,
            growth.finish,
            sample,
            features,
        )
    from quire.kernels import growth as grown
    from quire.kernels import step_reference

    return StepKernels(
        step_reference.scatter, step_reference.gather_inputs, step_reference.draw, lambda rows, vocab: None,
        step_reference.keep_features, step_reference.fetch_features, step_reference.walk_trees,
        step_reference.follow_chains, grown.grow, grown.finish,
    )


def device_ops(options: DeviceOptions, device: torch.device, dtype: torch.dtype) -> Ops:
    """The model's operations on a GPU."""
    if device.type != "cuda":
        raise ConfigError("no kernels for this device: pass `ops` explicitly unless the device is cuda", "device")
    from quire.ops.triton import KV_DTYPES, TritonOps

    return TritonOps(
        device,
        dtype,
        deterministic=options.deterministic,
        kv_dtype=KV_DTYPES[options.kv_cache_dtype],
        dense_prefill=options.dense_prefill,
        prompt_rows=options.prompt_rows,
        pdl=options.launch_early,
        named_algorithms=options.named_algorithms,
        fixed_prefetch=options.fixed_prefetch,
        fixed_fusion=options.fixed_fusion,
        few_rows=options.few_rows,
        rounding=options.rounding,
    )
