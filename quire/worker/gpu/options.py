"""How a model runs on a GPU: the engine's options as its worker takes them, and what a chip can do of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.config import GPU_DEFAULTS, EngineConfig
from quire.errors import ConfigError
from quire.kernels.quantized import Rounding

MOST_DRAFT_ROWS = 512
"""64 sequences with 7 drafts each: 512 rows with the sequences' own. With more sequences each gets fewer drafts."""
_LEAST_CAPABILITY = (8, 0)
_FP8_CAPABILITY = (8, 9)
DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a model runs on a GPU."""

    device: str = "cuda"
    dtype: str = "auto"
    max_num_seqs: int = GPU_DEFAULTS.max_num_seqs
    max_num_batched_tokens: int = GPU_DEFAULTS.max_num_batched_tokens
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    deterministic: bool = False
    kv_cache_dtype: str = "auto"
    dense_prefill: bool = True
    launch_early: bool = True
    """Programmatic dependent launch: a kernel of a small step starts while the one before it ends."""
    named_algorithms: bool = True
    """GEMMs on cuBLAS use the algorithm that the GEMM table names, not the library's own choice."""
    fixed_prefetch: bool = True
    """With `deterministic`, on Hopper: GEMMs by the kernels that `kernels.triton.fixed_table` names, with the same
    bits; those it does not know by `kernels.triton.fixed_prefetch` up to 8 rows."""
    fixed_fusion: bool = True
    """With `deterministic` and `fixed_prefetch`, on Hopper: norms, gates and residuals of small models inside GEMMs of
    up to 8 rows (`kernels.cuda.fixed_few`), with the same bits."""
    few_rows: bool = True
    """On Hopper: GEMMs of 2 to 8 rows by `kernels.cuda.few_gemm`, with norm, gate and residual, where the GEMM table
    has their weight."""
    fuse_rope: bool = True
    """Norm, rotation and KV write run inside decode attention; never in steps with drafts, whose queries see keys of
    other rows of the step."""
    prompt_rows: bool = True
    """Prompts without context read K and V from their step's rows, by TMA, and not from the cache."""
    pad_mixed: bool = True
    """Small mixed steps are padded to fixed shapes and replayed as graphs, like decode steps."""
    rounding: Rounding | None = None
    """What becomes of weights that the file stores as floats; None: they stay as they are."""
    seed: int = 0
    draft_rows: int = 0
    """Drafts that a step may hold beside one token of every sequence: each is a row of the decode graphs."""


def supported(options: DeviceOptions, capability: tuple[int, int]) -> DeviceOptions:
    """Without what a GPU of that compute capability lacks: dependent launches and the copy engine came with Hopper.
    Before 8.0 there is no bfloat16, and no kernel has been compiled for such chips."""
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(f"this GPU has compute capability {'.'.join(map(str, capability))}, and Quire's kernels need "
                          "8.0 or more: use device='cpu'", field="device")
    if options.kv_cache_dtype == "fp8" and capability < _FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or more, and this one has "
            f"{'.'.join(map(str, capability))}: use kv_cache_dtype='auto'", field="kv_cache_dtype")
    if options.rounding is not None and options.rounding.fp8 and capability < _FP8_CAPABILITY:
        raise ConfigError(f"quantization 'fp8' needs a GPU of compute capability 8.9 or more, and this one has "
                          f"{'.'.join(map(str, capability))}: use int4, or no quantization", field="quantization")
    return options if capability >= (9, 0) else replace(options, launch_early=False, prompt_rows=False)


def draft_rows(config: EngineConfig) -> int:
    """Drafts that a step may hold: rows of its decode graphs beside one of every sequence."""
    options = config.speculation.options
    if options is None or config.model.device != "cuda":
        return 0
    return min(options.most_drafts * config.scheduler.num_seqs(gpu=True), MOST_DRAFT_ROWS)


def device_options(config: EngineConfig, max_positions: int, device: str = "cuda") -> DeviceOptions:
    """Those of a resolved configuration, for a model of so many positions."""
    model, limits = config.model, config.scheduler
    budget = limits.max_num_batched_tokens
    if budget is None:
        # Without chunks a step must hold a whole prompt.
        budget = max(GPU_DEFAULTS.max_num_batched_tokens, model.max_model_len or max_positions)
    return DeviceOptions(
        device=device,
        dtype=model.dtype,
        max_num_seqs=limits.num_seqs(gpu=True),
        max_num_batched_tokens=budget,
        max_model_len=model.max_model_len,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        enforce_eager=model.enforce_eager,
        deterministic=model.deterministic,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        rounding=model.rounding,
        seed=model.seed,
        draft_rows=draft_rows(config),
    )
