"""Every option of the engine, documented once; keyword arguments and command-line flags derive from here."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.kernels.quantized import Rounding
from quire.options import check_type, option, parse_bytes, read_kv_secret
from quire.speculation.options import METHODS, SpeculationOptions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, from where, and in what shape it is loaded."""

    model: str = option("smollm2-135m", "alias, path of a .gguf file, Hugging Face folder, or hub id")
    tokenizer: str | None = option(
        None, "folder, tokenizer.json or .gguf to take the tokenizer from (default: the model)")
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and outputs are token ids only")
    dtype: str = option("auto", "type of weights and activations; auto is float32 on a CPU, bfloat16 on a GPU. On a "
                                "CPU float32 makes floats of weights that the file stores as integers, too",
                        ("auto", "float32", "bfloat16", "float16"))
    quantization: str | None = option(
        None, "multiply weights as integers or in fp8. On a CPU int8 and int4 round weights that the file stores as "
              "floats to so many bits (some to more, see docs), on a GPU fp8 too (not embedding and head); "
              "weights that the file stores quantized keep their bits. file rounds nothing (default: file for files of "
              "quantized weights, unless dtype is given)",
        ("int8", "int4", "fp8", "file"))
    quantization_group_size: int | None = option(
        None, "with quantization int8 or int4: columns of a weight that share a scale, 32, 64 or 128; 0: one scale per "
              "output channel (default: 32 on a CPU; on a GPU 128 with int4, 0 with int8)")
    quantization_zero_points: bool | None = option(
        None, "with quantization int8 or int4: codes count from the least weight of a group instead of lying around "
              "zero (default: with int4)")
    seed: int = option(0, "seed from which requests without one of their own draw theirs")
    max_model_len: int | None = option(
        None, "longest prompt plus output (default: what model and KV pool allow); within a longrope's trained length "
        "it takes the short factors, else the long ones")
    load_format: str = option("auto", "how weights are stored; dummy makes random ones",
                              ("auto", "gguf", "safetensors", "dummy"))
    cache_dir: str | None = option(
        None, "where downloaded models are kept (default: the user's cache folder)")
    device: str = option("auto", "where the model runs; auto is a GPU where there is one",
                         ("auto", "cpu", "cuda"))
    num_threads: int | None = option(
        None, "threads of the CPU kernels (default: the cores this process may use)")
    executor: str = option("auto", "who computes the tokens: the model, or (dummy) nobody: they are made up at once, "
                                   "which measures everything around a model", ("auto", "dummy"))
    dummy_step_ms: float = option(0.0, "with the dummy executor: milliseconds that a step pretends to take")
    dummy_script: str | None = option(
        None, "with the dummy executor: file with the texts that the model writes, a JSON object in each line: after "
              "(part of the prompt) and say")
    enforce_eager: bool = option(False, "on a GPU: launch every kernel anew instead of replaying captured graphs")
    compile_ahead: bool | None = option(
        None, "on one Hopper GPU: compile the kernels of a first start in processes beside it, while weights load; "
              "what is missing is compiled as without it (default: where there are eight cores)")
    deterministic: bool = option(
        False, "on a GPU: the same bits whatever the batch, chunks, cache and graphs, at some cost in speed "
               "(a CPU always has them)")

    @property
    def asks_for_floats(self) -> bool:
        """A type was named and no quantization: weights that the file stores quantized become floats at load."""
        return self.quantization is None and self.dtype != "auto"

    @property
    def rounding(self) -> Rounding | None:
        """Which weights are multiplied as integers; None: none."""
        if self.quantization_group_size not in (None, 0, 32, 64, 128):
            raise ConfigError(f"quantization_group_size must be 32, 64, 128 or 0, not {self.quantization_group_size}",
                              field="quantization_group_size")
        if self.quantization in (None, "file", "fp8"):
            for name in ("quantization_group_size", "quantization_zero_points"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} says how weights are rounded: set quantization to int8 or int4",
                                      field=name)
            return None if self.quantization is None else Rounding(None, fp8=self.quantization == "fp8")
        bits = 8 if self.quantization == "int8" else 4
        zero_points = bits == 4 if self.quantization_zero_points is None else self.quantization_zero_points
        usual = (0 if bits == 8 else 128) if self.device == "cuda" else 32
        group = usual if self.quantization_group_size is None else self.quantization_group_size
        return Rounding(bits, group, zero_points)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache: size of a block, number of blocks, what is kept for reuse."""

    block_size: int = option(16, "tokens per KV block")
    num_kv_blocks: int | None = option(None, "number of KV blocks (default: from kv_cache_memory)")
    kv_cache_memory: int | str | None = option(None, "bytes for the KV pool, or a text such as 2GiB "
                                                     "(default: a share of free memory)")
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory that may be in use, by this engine and everybody else, when it has taken "
             "its KV pool")
    kv_cache_dtype: str = option("auto", "type of keys and values in the cache; auto is that of the model, fp8 "
                                         "(GPU only) halves it, int8 (CPU only) is a quarter of float32",
                                 ("auto", "fp8", "int8"))
    enable_prefix_caching: bool = option(True, "reuse the KV of prompts that start alike")
    swap_space: float = option(0.0, "GiB of host memory for KV that was preempted or evicted (0: none)")
    offload: bool = option(False, "keep evicted prefixes in the swap space and bring them back when they are "
                                  "asked for again")
    kv_fetch_timeout: float = option(30.0, "seconds that a request waits for KV from another tier before it computes "
                                           "what has not come")
    eviction_policy: str = option("reuse-rate", "which idle cached block gives up its place first: the one least "
                                  "likely to be asked for again, as learned so far, the least recently used, or the "
                                  "one whose second-last use is longest ago",
                                  ("reuse-rate", "lru", "lru-2"))
    kv_disk: str | None = option(
        None, "keep prefixes in this directory, at most so many bytes, and find them again after a restart: PATH:SIZE, "
              "as in /var/cache/quire-kv:20GiB (default: none)")
    kv_pool: str | None = option(
        None, "share prefixes with other engines that have the same secret: mooncake://master:port (Mooncake Store), "
              "or an index of what peers hold in memory, redis://host:port or the http://host:port of a router "
              "(default: none)")
    kv_pool_policy: str = option(
        "benefit", "which KV goes to and comes from disks and pools: what saves time by the measured cost of prefill "
                   "and the measured bandwidth, or all of it", ("benefit", "all"))
    kv_lookup_timeout: float = option(5.0, "milliseconds that a request waits to hear whether a store on the network "
                                           "has its prefix")
    kv_secret_file: str | None = option(
        None, "file with the secret that replicas and their router share: at least 16 characters, from which the names "
              "of prefixes are made (default: $QUIRE_KV_SECRET; none: each engine draws its own)")

    @property
    def disk(self) -> tuple[Path, int] | None:
        """Directory and bytes of `kv_disk`."""
        return None if self.kv_disk is None else parse_disk(self.kv_disk)

    @property
    def kv_secret(self) -> bytes | None:
        """None: there is none to share. Raises ConfigError where it cannot be read or is too short to be one."""
        return read_kv_secret(self.kv_secret_file)


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What a device decides where the user did not."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_steps_in_flight: int


CPU_DEFAULTS = DeviceDefaults(max_num_seqs=128, max_num_batched_tokens=512, max_steps_in_flight=1)
"""In steps of 512 a prompt costs the same as in chunks of 256 or 2048, and streams beside it stutter the less."""
GPU_DEFAULTS = DeviceDefaults(max_num_seqs=256, max_num_batched_tokens=8192, max_steps_in_flight=2)


def _by_device(name: str) -> str:
    """A default, as help texts name it."""
    return f"(default: {getattr(CPU_DEFAULTS, name)}, on a GPU {getattr(GPU_DEFAULTS, name)})"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold, and who goes first."""

    max_num_seqs: int | None = option(None, f"most sequences running at once {_by_device('max_num_seqs')}")
    max_num_batched_tokens: int | None = option(
        None, f"most tokens computed in one step (default: {CPU_DEFAULTS.max_num_batched_tokens}, in stages of a "
              f"pipeline 96; on a GPU {GPU_DEFAULTS.max_num_batched_tokens})")
    enable_chunked_prefill: bool = option(
        True, "let a long prompt be computed in pieces beside decoding sequences")
    max_num_partial_prefills: int = option(1, "most prompts that may be half computed at once")
    long_prefill_token_threshold: int = option(0, "most tokens of one prompt in one step (0: no such limit)")
    scheduling_policy: str = option(
        "fcfs", "order of the waiting queue: by arrival; by priority, which also preempts; or fair among tenants",
        ("fcfs", "priority", "fair"))
    preemption_mode: str = option(
        "auto", "what becomes of the KV of a preempted request: computed again, moved to the swap space, or "
                "whichever is cheaper here", ("auto", "recompute", "swap"))
    batching_policy: str = option(
        "decode-first", "what fills a step first", ("decode-first", "prefill-first", "static"))
    itl_slo_ms: float | None = option(
        None, "longest time between two tokens of a stream, in milliseconds: chunks of prompts are sized to "
              "hold it (default: no bound)")
    max_steps_in_flight: int | None = option(
        None, "steps that may be under way at once: 1 plans none ahead of the results "
              f"{_by_device('max_steps_in_flight')}")

    def num_seqs(self, gpu: bool) -> int:
        return self.max_num_seqs or (GPU_DEFAULTS if gpu else CPU_DEFAULTS).max_num_seqs

    def resolved(self, gpu: bool) -> SchedulerConfig:
        """With what the device decides where the user did not."""
        defaults = GPU_DEFAULTS if gpu else CPU_DEFAULTS
        budget = defaults.max_num_batched_tokens if gpu and self.enable_chunked_prefill else None
        return dataclasses.replace(
            self,
            max_num_seqs=self.num_seqs(gpu),
            max_steps_in_flight=self.max_steps_in_flight or defaults.max_steps_in_flight,
            max_num_batched_tokens=self.max_num_batched_tokens or budget,
        )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Whether tokens are guessed ahead and checked several at once."""

    speculative_config: dict[str, object] | None = option(  # noqa: RUF009 (a field, as everywhere here)
        None, "guess tokens ahead and check several in one step, as in {\"method\": \"ngram\", "
              "\"num_speculative_tokens\": 8}; methods: ngram, suffix, draft_model, skip_layers, eagle, mtp "
              "(default: off)")
    speculative: str | None = option(
        None, "a method by its name, with what it does by default: short for speculative_config {\"method\": ...}",
        choices=METHODS)

    @property
    def options(self) -> SpeculationOptions | None:
        """What they say, checked; None where there is no speculation."""
        if self.speculative_config is not None and self.speculative is not None:
            raise ConfigError("speculative is short for speculative_config with a method alone: give one of them",
                              field="speculative")
        given = self.speculative_config if self.speculative is None else {"method": self.speculative}
        return None if given is None else SpeculationOptions.parse(given)


@dataclass(frozen=True, slots=True)
class StructuredConfig:
    """What compiling the grammars of structured outputs may take, and how many of them are kept."""

    grammar_timeout: float = option(30.0, "most seconds of computing that compiling a grammar may take")
    grammar_cache_memory: int | str = option("256MiB", "bytes for compiled grammars, or a text such as 1GiB")
    grammar_threads: int = option(2, "grammars compiled at once")
    grammar_token_ms: float = option(250.0, "most milliseconds of computing that a grammar may take for one token "
                                            "(`quire serve`: a request that needs more fails)")
    grammar_request_timeout: float = option(30.0, "the same in seconds for all tokens of a request")
    grammar_memory: int | str = option("1GiB", "most memory that a grammar may take while it is compiled or followed "
                                               "(`quire serve`)")
    grammar_warm_start: bool = option(True, "start the process that compiles grammars soon after the engine, at the "
                                            "lowest priority, not when the first is asked for (`quire serve`)")


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """Prompts that one engine computes and another goes on with: which part this one plays, and with whom."""

    kv_role: str | None = option(
        None, "prefill: compute prompts for other engines; decode: let others compute prompts for this one; both "
              "(default: neither)", ("prefill", "decode", "both"))
    kv_listen: str = option("127.0.0.1:0", "address and port on which other engines reach this one (port 0: any)")
    kv_peers: str | None = option(
        None, "prefill servers that may be asked, separated by commas: http://host:port of a server, or kv://host:port "
              "of an engine; a request that names none asks these in turn")
    kv_lease: float = option(5.0, "seconds without a sign of life after which another engine counts as dead: then its "
                                  "blocks are given back, and its prompts are computed elsewhere")
    kv_transports: str = option("shm,tcp", "ways in which KV may travel, separated by commas: shm, tcp, mooncake")
    kv_least_tokens: int = option(32, "prompts of which fewer tokens are missing are computed here")
    kv_convert_dtype: bool = option(False, "take KV of another element type than this engine's, and convert it")

    @property
    def computes(self) -> bool:
        """Prompts for others."""
        return self.kv_role in ("prefill", "both")

    @property
    def asks(self) -> bool:
        """Others for prompts."""
        return self.kv_role in ("decode", "both")

    @property
    def peers(self) -> list[str]:
        return [each.strip() for each in (self.kv_peers or "").split(",") if each.strip()]

    @property
    def transports(self) -> list[str]:
        return [each.strip() for each in self.kv_transports.split(",") if each.strip()]

    @property
    def listen(self) -> tuple[str, int]:
        host, _, port = self.kv_listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"kv_listen must be an address and a port, as in 127.0.0.1:9000, not {self.kv_listen!r}",
                              field="kv_listen")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """One model over several ranks: how it is cut, and what runs the ranks."""

    tensor_parallel_size: int = option(1, "ranks that share every layer: each has some of its heads and of its width")
    pipeline_parallel_size: int = option(1, "stages that share the layers: each has a run of them")
    distributed_executor_backend: str = option(
        "auto", "who runs the ranks: processes of this machine, actors of a Ray cluster, or (for tests) threads of "
                "the engine's process; auto is processes, or Ray where ray_address is given",
        ("auto", "mp", "ray", "threads"))
    rank_exchange: str = option(
        "ipc", "how ranks on GPUs add up large sums: ipc reads each other's memory (CUDA IPC); nccl, for ranks with a "
               "GPU each and without deterministic, has never run on a chip",
        ("ipc", "nccl"))
    ray_address: str | None = option(
        None, "a running Ray cluster for the ranks, as `ray start` names it (default: the one that this process is "
              "connected to, else one that runs on this machine, else a new one)")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def backend(self) -> str:
        """"mp", "ray" or "threads"."""
        if self.distributed_executor_backend != "auto":
            return self.distributed_executor_backend
        return "mp" if self.ray_address is None else "ray"

    @property
    def distributed(self) -> bool:
        """Ranks have processes of their own; else the engine's own process runs the model."""
        return self.num_ranks > 1 or self.distributed_executor_backend != "auto" or self.ray_address is not None


_SECTIONS: dict[str, type] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig,
                              "speculation": SpeculationConfig, "structured": StructuredConfig,
                              "transfer": KVTransferConfig, "parallel": ParallelConfig}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All sections together; build it with `EngineConfig.create(block_size=32, ...)`."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculation: SpeculationConfig = SpeculationConfig()
    structured: StructuredConfig = StructuredConfig()
    transfer: KVTransferConfig = KVTransferConfig()
    parallel: ParallelConfig = ParallelConfig()

    @classmethod
    def create(cls, **options: Any) -> EngineConfig:
        """Sort flat keywords into sections; an unknown one raises with the nearest known name.

        `kv_transfer={"role": …, "peers": …}` is short for `kv_role`, `kv_peers` and so on.
        """
        options = _spread_kv_transfer(options)
        sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        owner = {f.name: name for name, section in _SECTIONS.items() for f in dataclasses.fields(section)}
        for key, value in options.items():
            if key not in owner:
                near = difflib.get_close_matches(key, owner, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(sorted(owner))}"
                raise ConfigError(f"unknown option {key!r}; {hint}", field=key)
            sections[owner[key]][key] = value
        config = cls(**{name: _SECTIONS[name](**values) for name, values in sections.items()})
        config.validate()
        return config

    def to_options(self) -> dict[str, Any]:
        """Flat keywords of which `create` makes an equal configuration; plain data."""
        return {f.name: getattr(getattr(self, name), f.name) for name, f in option_fields()}

    def validate(self) -> None:
        for name in _SECTIONS:
            section = getattr(self, name)
            for f in dataclasses.fields(section):
                check_type(f, getattr(section, f.name))
        _check_ranges(self)


def _spread_kv_transfer(options: dict[str, Any]) -> dict[str, Any]:
    given = options.get("kv_transfer")
    if given is None:
        return {name: value for name, value in options.items() if name != "kv_transfer"}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"kv_transfer must be a dict such as {{'role': 'decode'}}, not {given!r:.80}",
                          field="kv_transfer")
    spread = {f"kv_{name}": ",".join(value) if isinstance(value, list | tuple) else value
              for name, value in given.items()}
    return {**{name: value for name, value in options.items() if name != "kv_transfer"}, **spread}


def option_fields() -> list[tuple[str, dataclasses.Field[Any]]]:
    """(section name, field) of every option, for the command line and the docs."""
    return [(name, f) for name, section in _SECTIONS.items() for f in dataclasses.fields(section)]


def _check_ranges(config: EngineConfig) -> None:
    lows: list[tuple[str, int | None, int, int]] = [
        ("max_model_len", config.model.max_model_len, 1, 1 << 30),
        ("num_threads", config.model.num_threads, 1, 1024),
        ("block_size", config.cache.block_size, 1, 1024),
        ("num_kv_blocks", config.cache.num_kv_blocks, 1, 1 << 30),
        ("max_num_seqs", config.scheduler.max_num_seqs, 1, 1 << 16),
        ("max_num_batched_tokens", config.scheduler.max_num_batched_tokens, 1, 1 << 24),
        ("max_num_partial_prefills", config.scheduler.max_num_partial_prefills, 1, 1 << 16),
        ("long_prefill_token_threshold", config.scheduler.long_prefill_token_threshold, 0, 1 << 24),
        ("max_steps_in_flight", config.scheduler.max_steps_in_flight, 1, 16),
        ("tensor_parallel_size", config.parallel.tensor_parallel_size, 1, MOST_RANKS),
        ("pipeline_parallel_size", config.parallel.pipeline_parallel_size, 1, MOST_RANKS),
    ]
    for name, value, low, high in lows:
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} must be between {low} and {high}, not {value}", field=name)
    if not 0 <= config.model.seed < 1 << 64:
        raise ConfigError(f"seed must be between 0 and 2**64 - 1, not {config.model.seed}", field="seed")
    pretended = config.model.dummy_step_ms
    if not 0.0 <= pretended <= 1e6 or (pretended and config.model.executor != "dummy"):
        raise ConfigError(f"dummy_step_ms must be between 0 and 1000000, and 0 unless executor is 'dummy', not "
                          f"{pretended}", field="dummy_step_ms")
    if config.model.dummy_script is not None and (config.model.executor != "dummy" or config.model.skip_tokenizer_init):
        raise ConfigError("dummy_script needs executor 'dummy' and a tokenizer", field="dummy_script")
    _ = config.speculation.options
    _ = config.model.rounding
    _check_slo(config.scheduler)
    _check_swap(config)
    _check_structured(config.structured)
    _check_transfer(config)
    _check_parallel(config.parallel)
    _check_tree(config)
    share = config.cache.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}",
                          field="gpu_memory_utilization")
    if config.cache.num_kv_blocks is not None and config.cache.kv_cache_memory is not None:
        raise ConfigError("give num_kv_blocks or kv_cache_memory, not both", field="num_kv_blocks")
    if config.cache.kv_cache_memory is not None:
        parse_bytes(config.cache.kv_cache_memory, "kv_cache_memory")
    _ = config.cache.kv_secret
    _check_pool(config)


def _check_transfer(config: EngineConfig) -> None:
    transfer = config.transfer
    _ = transfer.listen
    if not 0.05 <= transfer.kv_lease <= 3600.0:
        raise ConfigError(f"kv_lease must be between 0.05 and 3600 seconds, not {transfer.kv_lease}", field="kv_lease")
    if not 1 <= transfer.kv_least_tokens <= 1 << 24:
        raise ConfigError(f"kv_least_tokens must be between 1 and {1 << 24}, not {transfer.kv_least_tokens}",
                          field="kv_least_tokens")
    if transfer.kv_peers is not None and not transfer.asks:
        raise ConfigError("kv_peers names engines to ask for prompts, which needs kv_role 'decode' or 'both'",
                          field="kv_peers")
    if transfer.kv_role is not None and config.cache.kv_secret is None:
        raise ConfigError("kv_role needs a secret that the engines share: set $QUIRE_KV_SECRET or kv_secret_file",
                          field="kv_role")


def _check_swap(config: EngineConfig) -> None:
    space = config.cache.swap_space
    if not 0.0 <= space <= 1 << 20:
        raise ConfigError(f"swap_space must be between 0 and 1048576 GiB, not {space}", field="swap_space")
    if config.cache.offload and not config.cache.enable_prefix_caching:
        raise ConfigError("offload keeps evicted prefixes, and without enable_prefix_caching there are none",
                          field="offload")
    wait = config.cache.kv_fetch_timeout
    if not 0.0 < wait <= 86400.0:
        raise ConfigError(f"kv_fetch_timeout must be above 0 and at most 86400 seconds, not {wait}",
                          field="kv_fetch_timeout")
    if space > 0:
        return
    if config.cache.offload:
        raise ConfigError("offload keeps evicted prefixes in the swap space: give swap_space", field="offload")
    if config.scheduler.preemption_mode == "swap":
        raise ConfigError("preemption_mode 'swap' needs room to move KV to: give swap_space",
                          field="preemption_mode")


def _check_pool(config: EngineConfig) -> None:
    cache = config.cache
    if not 0.0 < cache.kv_lookup_timeout <= 60_000.0:
        raise ConfigError(f"kv_lookup_timeout must be above 0 and at most 60000 milliseconds, not "
                          f"{cache.kv_lookup_timeout}", field="kv_lookup_timeout")
    _ = cache.disk
    field = "kv_disk" if cache.kv_disk is not None else "kv_pool"
    if cache.kv_disk is None and cache.kv_pool is None:
        return
    if _UNIT_TOKENS % cache.block_size:
        raise ConfigError(f"{field} keeps units of {_UNIT_TOKENS} tokens: block_size must divide that, and "
                          f"{cache.block_size} does not", field="block_size")
    if not cache.enable_prefix_caching:
        raise ConfigError(f"{field} keeps prefixes, and without enable_prefix_caching there are none", field=field)
    options = config.speculation.options
    if options is not None and options.own_kv:
        raise ConfigError(f"{field} does not keep the KV of a draft model or head: leave it out, or use a speculative "
                          "method without a model of its own", field=field)
    if cache.kv_pool is not None:
        if cache.kv_pool.partition("://")[0] not in _POOL_SCHEMES:
            raise ConfigError(f"kv_pool must begin with {', '.join(f'{s}://' for s in _POOL_SCHEMES)}, not "
                              f"{cache.kv_pool!r}", field="kv_pool")
        if cache.kv_secret is None:
            raise ConfigError("kv_pool shares KV with other engines, and its names are made from a secret that they "
                              "have too: give kv_secret_file or $QUIRE_KV_SECRET", field="kv_secret_file")


def _check_structured(options: StructuredConfig) -> None:
    if not 0.0 < options.grammar_timeout <= 86400.0:
        raise ConfigError(f"grammar_timeout must be above 0 and at most 86400, not {options.grammar_timeout}",
                          field="grammar_timeout")
    if not 1 <= options.grammar_threads <= 256:
        raise ConfigError(f"grammar_threads must be between 1 and 256, not {options.grammar_threads}",
                          field="grammar_threads")
    for name, value, most in (("grammar_token_ms", options.grammar_token_ms, 1e6),
                              ("grammar_request_timeout", options.grammar_request_timeout, 86400.0)):
        if not 0.0 < value <= most:
            raise ConfigError(f"{name} must be above 0 and at most {most:g}, not {value}", field=name)
    parse_bytes(options.grammar_cache_memory, "grammar_cache_memory")
    parse_bytes(options.grammar_memory, "grammar_memory")


MOST_RANKS = 64
"""Of one engine."""


def _check_parallel(options: ParallelConfig) -> None:
    if options.num_ranks > MOST_RANKS:
        raise ConfigError(f"tensor_parallel_size x pipeline_parallel_size is {options.num_ranks} ranks; an engine has "
                          f"at most {MOST_RANKS}: lower one of them", field="tensor_parallel_size")
    if options.ray_address is not None and options.backend != "ray":
        raise ConfigError(f"ray_address is for distributed_executor_backend 'ray', not {options.backend!r}",
                          field="ray_address")


def _check_tree(config: EngineConfig) -> None:
    """Stages that do not draw move a branch that was kept when the next plan comes; KV that leaves the engine does not
    wait for that."""
    options = config.speculation.options
    if options is None or options.tree is None or config.parallel.pipeline_parallel_size == 1:
        return
    for field, value in (("kv_role", config.transfer.kv_role), ("kv_disk", config.cache.kv_disk),
                         ("kv_pool", config.cache.kv_pool)):
        if value is not None:
            raise ConfigError(f"{field} does not go with speculative_config tree and pipeline_parallel_size > 1: leave "
                              "one of the three out", field=field)


def _check_slo(options: SchedulerConfig) -> None:
    bound = options.itl_slo_ms
    if bound is None:
        return
    if not 0.0 < bound <= 1e6:
        raise ConfigError(f"itl_slo_ms must be above 0 and at most 1000000, not {bound}", field="itl_slo_ms")
    if options.batching_policy != "decode-first" or not options.enable_chunked_prefill:
        raise ConfigError("itl_slo_ms sizes the chunks of prompts beside decoding sequences: it needs "
                          "batching_policy 'decode-first' and enable_chunked_prefill", field="itl_slo_ms")


_POOL_SCHEMES = ("mooncake", "redis", "rediss", "http", "https")
_UNIT_TOKENS = 256
"""Of a pool (`kvpool/keys.py`)."""
def parse_disk(value: str) -> tuple[Path, int]:
    """`/path/of/a/directory:20GiB` as the directory and a number of bytes."""
    path, colon, size = value.rpartition(":")
    if not colon or not path:
        raise ConfigError(f"kv_disk must be PATH:SIZE, as in /var/cache/quire-kv:20GiB, not {value!r}", field="kv_disk")
    return Path(path).expanduser(), parse_bytes(size, "kv_disk")


def default_cache_dir() -> Path:
    """The user's cache folder for models: $QUIRE_CACHE, else $XDG_CACHE_HOME/quire, else ~/.cache/quire."""
    override = os.environ.get("QUIRE_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "quire"


def gpu_index(name: str) -> int:
    """How this process counts a GPU that its machine calls by this number: it may see some of them only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(name) if visible else int(name)


def kernel_cache() -> Path:
    """Triton's folder of compiled kernels, found as Triton finds it, without importing it."""
    given, home = os.environ.get("TRITON_CACHE_DIR"), os.environ.get("TRITON_HOME")
    return Path(given) if given else Path(home or Path.home()) / ".triton" / "cache"
