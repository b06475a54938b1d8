"""How many KV blocks fit on a GPU: measure what is free and what a step of the largest size takes, then divide.

Whatever else lives on the GPU (another engine, another process) is in the measurement, not in an assumption.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.config import CacheConfig
from quire.errors import ConfigError, OutOfMemoryError
from quire.models.heads.spec import HeadSpec
from quire.models.shard import Shard
from quire.models.spec import DecoderSpec
from quire.options import parse_bytes
from quire.worker.memory import PoolSize, block_bytes

_RESERVE = 1 << 30
"""For captured graphs, library workspaces, fragments and the full sampler's sorts, which no dummy step shows."""


def measure_step(run: Callable[[], None], device: torch.device) -> int:
    """Bytes that `run` needs beyond what is allocated before it."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def pool_bytes(free: int, total: int, utilization: float, step_bytes: int, sharing: int = 1) -> int:
    """What is left for KV when this engine and everything else on the GPU may use `utilization` of it. Of an engine of
    which `sharing` ranks are on this GPU, each gets as much; the one that looks last sees what the others hold."""
    return (int(total * utilization) - (total - free)) // sharing - step_bytes - _RESERVE


def size_device_pool(
    shard: Shard,
    cache: CacheConfig,
    max_model_len: int,
    element_size: int,
    free: int,
    total: int,
    utilization: float,
    step_bytes: int,
    given_len: bool = True,
    draft: DecoderSpec | HeadSpec | None = None,
    sharing: int = 1,
) -> PoolSize:
    """Blocks from num_kv_blocks, kv_cache_memory (which is that of all ranks together) or what `utilization` leaves;
    the length that they allow. `sharing`: ranks of this engine on this GPU."""
    drafts = 0 if draft is None else draft.kv_bytes_per_block(cache.block_size, element_size)
    place = shard.place
    at_end = isinstance(draft, HeadSpec)  # a draft model is on every stage
    block = block_bytes(shard, cache.block_size, element_size=element_size)
    per_block = block.own + (drafts if place.is_last or not at_end else 0)
    of_all = block.all + drafts * (place.tensor_size if at_end else place.num_ranks)
    if cache.num_kv_blocks is not None:
        blocks = cache.num_kv_blocks
    elif cache.kv_cache_memory is not None:
        blocks = parse_bytes(cache.kv_cache_memory, "kv_cache_memory") // of_all
    else:
        blocks = pool_bytes(free, total, utilization, step_bytes, sharing) // per_block
    if blocks < 1:
        raise OutOfMemoryError(
            f"no room for KV on the GPU: {_gib(free)} of {_gib(total)} are free, a step takes "
            f"{_gib(step_bytes)} and gpu_memory_utilization is {utilization}: raise it, lower "
            "max_num_batched_tokens or max_num_seqs, or stop what else runs on this GPU"
        )
    if blocks * per_block > free - step_bytes:
        raise OutOfMemoryError(
            f"a KV pool of {blocks} blocks takes {_gib(blocks * per_block)}, but {_gib(free)} are free on "
            f"the GPU and a step takes {_gib(step_bytes)}: lower num_kv_blocks or kv_cache_memory"
        )
    capacity = blocks * cache.block_size
    if max_model_len > capacity and given_len:
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit the KV pool, which holds {capacity} tokens: lower "
            "max_model_len, or raise gpu_memory_utilization or kv_cache_memory",
            field="max_model_len",
        )
    return PoolSize(blocks, min(max_model_len, capacity), of_all,
                    draft_bytes_per_token=0 if draft is None else draft.kv_bytes_per_token)


_SIGNS = ("out of memory", "ALLOC_FAILED", "cudaErrorMemoryAllocation")


def ran_out(error: BaseException) -> bool:
    """Whether memory is what an error is about: torch's allocator has a class for it, while cuBLAS, Triton, captured
    graphs and pinned memory say it in plain RuntimeErrors."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in said for sign in _SIGNS)
    )


def explain(error: BaseException) -> OutOfMemoryError:
    """The device ran out in a step: what to lower."""
    return OutOfMemoryError(
        "the GPU ran out of memory in a step: lower max_num_batched_tokens, max_num_seqs, "
        "gpu_memory_utilization or kv_cache_memory, or stop what else runs on this GPU "
        f"({_first_line(error)})"
    )


def _explain_request(error: BaseException) -> str:
    """The device ran out over what one request asked for beyond its share of the step."""
    return (
        "the GPU ran out of memory over this request's log-probabilities or sampling: ask for fewer (logprobs, "
        "prompt_logprobs, top_k, top_p), or lower gpu_memory_utilization or kv_cache_memory "
        f"({_first_line(error)})"
    )


def too_much(error: RuntimeError) -> str:
    """What a request is told whose wishes did not fit the memory; any other error is raised again."""
    if not ran_out(error):
        raise error
    return _explain_request(error)


def explain_start(error: BaseException) -> OutOfMemoryError:
    """The device ran out before the first step: in the weights, the trial step or the pool."""
    return OutOfMemoryError(
        "the GPU ran out of memory while the engine was built: lower gpu_memory_utilization, "
        "max_num_batched_tokens, max_num_seqs or kv_cache_memory, take a smaller dtype or model, or stop what "
        f"else runs on this GPU ({_first_line(error)})"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
