"""How many KV blocks fit, and how long a sequence may grow with them. Looks at the machine, never at tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config import CPU_DEFAULTS, CacheConfig, EngineConfig
from quire.errors import ConfigError, OutOfMemoryError
from quire.models.shard import Shard, shard_of
from quire.models.spec import CacheGroup, DecoderSpec
from quire.options import parse_bytes
from quire.parallel.place import Place

_DEFAULT_POOL_BYTES = 1 << 30
"""For each stage of a pipeline: each has its own sequences to compute, and so many more are under way."""
_DEFAULT_POOL_SHARE = 0.4
"""Most of the free memory that the default pool takes; the weights come out of the rest."""


_CACHED_WINDOWS = 4
"""Groups with a window get at least one block for so many of the others: cached prefixes need the end of theirs."""
_LEAST_PACKED_BYTES = 0.75
"""Per parameter, in the narrowest format that the kernels keep."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool and the longest sequence it is used for."""

    num_blocks: int
    max_model_len: int
    bytes_per_block: int
    """On all ranks together."""
    num_host_blocks: int = 0
    """Blocks of the host tier."""
    draft_bytes_per_token: int = 0
    """What a draft model, or a head, takes for each token on a rank that has it."""
    window_blocks: int | None = None
    """Blocks of a cache group with a sliding window; None: as many as of the others."""
    window_bytes_per_block: int = 0
    """Of `bytes_per_block`, what the groups with windows take."""

    def blocks_of(self, window: int | None) -> int:
        """Blocks of a cache group."""
        return self.num_blocks if window is None or self.window_blocks is None else self.window_blocks

    @property
    def num_bytes(self) -> int:
        spared = 0 if self.window_blocks is None else self.num_blocks - self.window_blocks
        return self.num_blocks * self.bytes_per_block - spared * self.window_bytes_per_block


def groups_with_draft(spec: DecoderSpec, draft_bytes_per_token: int) -> list[CacheGroup]:
    """The target's cache groups; a draft model's layers share the blocks of the one that keeps every token."""
    groups = spec.cache_groups()
    if not draft_bytes_per_token:
        return groups
    index = draft_group(spec)
    if index == len(groups):
        return [*groups, CacheGroup("full", None, (), draft_bytes_per_token)]
    groups[index] = replace(groups[index], bytes_per_token=groups[index].bytes_per_token + draft_bytes_per_token)
    return groups


def draft_group(spec: DecoderSpec) -> int:
    """Group of a draft model's layers: they keep every token, so that it can catch up from anywhere."""
    groups = spec.cache_groups()
    return next((index for index, group in enumerate(groups) if group.window is None), len(groups))


def available_memory() -> int:
    """Bytes that this process could still take: the machine's free memory, or less under a cgroup limit."""
    free = 8 << 30
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit_file, used_file in (("memory.max", "memory.current"),
                                  ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, used = _read(f"/sys/fs/cgroup/{limit_file}").strip(), _read(f"/sys/fs/cgroup/{used_file}").strip()
        if limit.isdigit() and used.isdigit():
            free = min(free, max(0, int(limit) - int(used)))
    return free


def check_weights_fit(num_parameters: int, packed: bool, free: int | None = None) -> None:
    """Refuse a model, or a rank's share of one, whose weights cannot be held, before the first is read. `packed`: they
    stay quantized."""
    free = available_memory() if free is None else free
    needed = int(num_parameters * (_LEAST_PACKED_BYTES if packed else 4))
    if needed > free:
        raise OutOfMemoryError(
            f"the model's {num_parameters:,} parameters take at least {_gib(needed)}, but {_gib(free)} are free: "
            "choose a smaller model, or check the shapes in its config")


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What one block takes: on this rank, and on all of them."""

    own: int
    all: int


@dataclass(frozen=True, slots=True)
class DraftKV:
    """What whoever makes drafts keeps of each token, and where: a draft model on the first tensor rank of every stage,
    a head on the rank that draws alone."""

    bytes_per_token: int = 0
    is_head: bool = False

    def on(self, place: Place) -> int:
        """Bytes per token on this rank."""
        has_it = place.is_sampler if self.is_head else place.tensor_rank == 0
        return self.bytes_per_token if has_it else 0


NO_DRAFT = DraftKV()


def block_bytes(shard: Shard, block_size: int, draft: DraftKV = NO_DRAFT, element_size: int = 4) -> BlockBytes:
    def of(place: Place) -> int:
        own = shard_of(shard.spec, place, shard.stages_help).kv_bytes_per_block(block_size, element_size)
        return own + draft.on(place) * block_size

    place = shard.place
    return BlockBytes(of(place), sum(of(each) for each in Place.all(place.tensor_size, place.num_stages)))


def size_pool(spec: DecoderSpec, cache: CacheConfig, max_model_len: int | None, max_num_seqs: int,
              free: int | None = None, draft: DraftKV = NO_DRAFT, shard: Shard | None = None,
              step_tokens: int | None = None) -> PoolSize:
    """Blocks from num_kv_blocks, kv_cache_memory or a share of free memory; the length they and the model allow.

    With `step_tokens`, the tokens that steps in flight may compute, groups with a sliding window get what they need and
    the others what that leaves; without it, or with num_kv_blocks, every group gets as many blocks.

    With a `shard` the blocks that its rank can hold of `free`, which is what this rank may take; the memory that the
    options name is that of all ranks together, so that every number of ranks has as many blocks.
    """
    free = available_memory() if free is None else free
    shard = shard_of(spec, Place()) if shard is None else shard
    block = block_bytes(shard, cache.block_size, draft)
    wanted_len = _model_length(spec, max_model_len)
    equal = _num_blocks(cache, block, free, wanted_len, max_num_seqs, shard.place.num_stages)
    if equal * block.own > free:
        raise OutOfMemoryError(
            f"a KV pool of {equal} blocks takes {_gib(equal * block.own)}, but {_gib(free)} are free: "
            "lower num_kv_blocks or kv_cache_memory")
    sizes = GroupSizes(equal)
    if step_tokens is not None and cache.num_kv_blocks is None:
        sizes = group_sizes(spec, equal, cache.block_size, max_num_seqs, step_tokens,
                            most=2 * max_num_seqs * -(-wanted_len // cache.block_size))
    num_blocks = sizes.num_blocks
    capacity = num_blocks * cache.block_size
    if max_model_len is not None and max_model_len > capacity:
        raise ConfigError(
            f"max_model_len {max_model_len} does not fit the KV pool, which holds {capacity} tokens ({num_blocks} "
            f"blocks of {cache.block_size}): lower max_model_len or raise num_kv_blocks or kv_cache_memory",
            field="max_model_len")
    num_host_blocks = size_host_tier(cache, block.all, free - equal * block.own, block.own)
    return PoolSize(num_blocks, min(wanted_len, capacity), block.all, num_host_blocks, draft.bytes_per_token,
                    sizes.window_blocks, _window_bytes(spec, cache.block_size))


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Blocks of cache groups that keep every token, and of those with a sliding window (None: as many)."""

    num_blocks: int
    window_blocks: int | None = None


def group_sizes(spec: DecoderSpec, equal: int, block_size: int, max_num_seqs: int, step_tokens: int,
                most: int) -> GroupSizes:
    """Share the memory of `equal` blocks of every group so that those with a window get what running sequences need,
    or a quarter as many as the others for cached prefixes, if that is more."""
    windows = [group.window for group in spec.cache_groups() if group.window is not None]
    if not windows or len(windows) == len(spec.cache_groups()):
        return GroupSizes(equal)
    per_block, window_bytes = spec.kv_bytes_per_block(block_size), _window_bytes(spec, block_size)
    full_bytes = per_block - window_bytes
    # Each sequence holds its window, cut at both ends, and one block that it writes; steps hold what they compute.
    least = max_num_seqs * (-(-max(windows) // block_size) + 2) + -(-step_tokens // block_size)
    memory = equal * per_block
    by_share = memory * _CACHED_WINDOWS // (_CACHED_WINDOWS * full_bytes + window_bytes)
    by_need = (memory - least * window_bytes) // full_bytes
    num_blocks = min(by_share, by_need, most)
    window_blocks = max(least, num_blocks // _CACHED_WINDOWS)
    return GroupSizes(num_blocks, window_blocks) if num_blocks > equal else GroupSizes(equal)


def _window_bytes(spec: DecoderSpec, block_size: int) -> int:
    return sum(group.bytes_per_token for group in spec.cache_groups() if group.window is not None) * block_size


def step_tokens_of(config: EngineConfig) -> int | None:
    """Tokens that steps in flight may compute; None where all cache groups must have as many blocks: KV that travels
    between engines or ranks is laid out so, and a draft model's layers share blocks of the target's."""
    cache, parallel, options = config.cache, config.parallel, config.scheduler
    speculation = config.speculation.options
    if (parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1 or config.transfer.kv_role is not None
            or cache.kv_disk is not None or cache.kv_pool is not None
            or (speculation is not None and speculation.own_kv)):
        return None
    if not options.enable_chunked_prefill:
        return None
    depth = options.max_steps_in_flight or CPU_DEFAULTS.max_steps_in_flight
    return depth * (options.max_num_batched_tokens or CPU_DEFAULTS.max_num_batched_tokens)


def smallest_pool(pools: Sequence[PoolSize]) -> PoolSize:
    """The pool that every rank can hold: there is one block table for all of them."""
    return replace(pools[0], num_blocks=min(pool.num_blocks for pool in pools),
                   max_model_len=min(pool.max_model_len for pool in pools),
                   num_host_blocks=min(pool.num_host_blocks for pool in pools))


def size_host_tier(cache: CacheConfig, per_block: int, free: int, own: int | None = None) -> int:
    """Blocks that swap_space holds; refuses more than the machine has. `own`: bytes of a block on this rank, of whose
    memory `free` are free."""
    wanted = int(cache.swap_space * 2**30)
    needed = wanted if own is None else wanted // per_block * own
    if needed > free:
        raise OutOfMemoryError(
            f"swap_space takes {_gib(needed)}, but {_gib(max(0, free))} are free beside the KV pool: lower it")
    if wanted and wanted < per_block:
        raise ConfigError(f"swap_space {cache.swap_space} GiB does not hold one block of {per_block} bytes: raise it",
                          field="swap_space")
    return wanted // per_block


def _model_length(spec: DecoderSpec, max_model_len: int | None) -> int:
    if max_model_len is None:
        return spec.max_positions
    if max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {spec.max_positions} positions the model was made for: "
            "lower it", field="max_model_len")
    return max_model_len


def _num_blocks(cache: CacheConfig, block: BlockBytes, free: int, wanted_len: int, max_num_seqs: int,
                num_stages: int) -> int:
    per_block = block.all
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    if cache.kv_cache_memory is not None:
        memory = parse_bytes(cache.kv_cache_memory, "kv_cache_memory")
        if memory < per_block:
            raise ConfigError(f"kv_cache_memory {memory} does not hold one block of {per_block} bytes: raise it",
                              field="kv_cache_memory")
        return memory // per_block
    one_sequence = -(-wanted_len // cache.block_size)
    affordable = min(max(num_stages * _DEFAULT_POOL_BYTES, one_sequence * per_block) // per_block,
                     int(free * _DEFAULT_POOL_SHARE) // block.own)
    # A tiny model's blocks are tiny: more than all sequences at full length, twice, would only slow the start.
    return max(1, min(affordable, 2 * max_num_seqs * one_sequence))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
