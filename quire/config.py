"""Every option of the engine, documented once; keyword arguments and command-line flags derive from here."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.speculation.options import SpeculationOptions


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that carries the one description of an option."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, from where, and in what shape it is loaded."""

    model: str = option("smollm2-135m", "alias, path of a .gguf file, Hugging Face folder, or hub id")
    tokenizer: str | None = option(
        None, "folder, tokenizer.json or .gguf to take the tokenizer from (default: the model)")
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and outputs are token ids only")
    dtype: str = option("auto", "type of weights and activations; auto is float32 on a CPU, bfloat16 on a GPU",
                        ("auto", "float32", "bfloat16", "float16"))
    seed: int = option(0, "seed from which requests without one of their own draw theirs")
    max_model_len: int | None = option(
        None, "longest prompt plus output (default: what model and KV pool allow)")
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
    deterministic: bool = option(
        False, "on a GPU: the same bits whatever the batch, chunks, cache and graphs, at some cost in speed "
               "(a CPU always has them)")


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
                                         "(GPU only) halves it", ("auto", "fp8"))
    enable_prefix_caching: bool = option(True, "reuse the KV of prompts that start alike")
    swap_space: float = option(0.0, "GiB of host memory for KV that was preempted or evicted (0: none)")
    offload: bool = option(False, "keep evicted prefixes in the swap space and bring them back when they are "
                                  "asked for again")
    kv_fetch_timeout: float = option(30.0, "seconds that a request waits for KV from another tier before it computes "
                                           "what has not come")
    eviction_policy: str = option("reuse-rate", "which idle cached block gives up its place first: the one least "
                                  "likely to be asked for again, as learned so far, or the least recently used",
                                  ("reuse-rate", "lru"))
    kv_secret_file: str | None = option(
        None, "file with the secret that replicas and their router share: at least 16 characters, from which the names "
              "of prefixes are made (default: $QUIRE_KV_SECRET; none: each engine draws its own)")

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
        None, f"most tokens computed in one step {_by_device('max_num_batched_tokens')}")
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
class GuardConfig:
    """How `AsyncLLM` guards an engine in its own process: who may wait, how long, and when it counts as dead."""

    max_waiting_requests: int = option(256, "most requests that wait for their turn; more are refused (429)")
    max_waiting_tokens: int = option(1 << 19, "most prompt tokens that wait; a prompt longer than that waits alone")
    request_timeout: float | None = option(None, "seconds after which a request is given up (default: never)")
    heartbeat_timeout: float = option(10.0, "seconds without a sign of life after which the engine is restarted")
    step_timeout: float = option(300.0, "seconds that one step may take before the engine counts as stuck")
    start_timeout: float = option(900.0, "seconds that the engine may take to load its model")
    max_restarts: int = option(8, "restarts in a row, with no request served between, before the engine is given up; "
                                  "`quire serve` then exits with code 1")
    keep_restarting: bool = option(False, "never give the engine up: after max_restarts in vain try again every 30 s")

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[GuardConfig, dict[str, Any]]:
        """Take its own options out of flat keywords, checked; the rest is the engine's."""
        names = {f.name for f in dataclasses.fields(cls)}
        guard = cls(**{name: value for name, value in options.items() if name in names})
        for f in dataclasses.fields(cls):
            _check_type(f, getattr(guard, f.name))
        for name, low in (("max_waiting_requests", 0), ("max_waiting_tokens", 0), ("max_restarts", 0)):
            if getattr(guard, name) < low:
                raise ConfigError(f"{name} must be at least {low}, not {getattr(guard, name)}", field=name)
        for name in ("request_timeout", "heartbeat_timeout", "step_timeout", "start_timeout"):
            value = getattr(guard, name)
            if value is not None and not 0.0 < value <= 1e9:
                raise ConfigError(f"{name} must be above 0 seconds, not {value}", field=name)
        return guard, {name: value for name, value in options.items() if name not in names}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`quire serve`: where it listens, whom it lets in, how much it takes on."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is all of them")
    port: int = option(8000, "port to listen on (0: any free one)")
    served_model_name: str | None = option(None, "name of the model in requests (default: the one it was started with)")
    api_key_file: str | None = option(
        None, "file with API keys, one per line, each optionally after a name of its own (default: the keys in "
              "$QUIRE_API_KEYS, separated by commas; none: everybody may ask)")
    allowed_origins: str | None = option(
        None, "web origins whose pages may call this server, separated by commas (default: none)")
    allowed_hosts: str | None = option(
        None, "names that a request may give as Host beside those of the loopback, separated by commas; * is any "
              "(default: none on a loopback address without API keys, else any)")
    request_timeout: float = option(600.0, "seconds that a request may take, from its arrival to its last token")
    read_timeout: float = option(30.0, "seconds that a client may take to send a request")
    drain_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    max_connections: int = option(1024, "most connections open at once")
    max_body_size: int | str = option("4MiB", "largest body of a request")
    max_prompts: int = option(128, "most prompts in one request to /v1/completions")
    max_n: int = option(16, "largest n and best_of of a request, and widest beam")
    max_logprobs: int = option(20, "largest logprobs and top_logprobs of a request")
    max_stops: int = option(16, "most stop strings of a request")
    max_schema_size: int | str = option("64KiB", "largest JSON schema, grammar or regular expression of a request")
    max_tools: int = option(128, "most tools of a request")
    tool_call_parser: str = option("auto", "how the model writes tool calls; auto looks at its chat template",
                                   ("auto", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm45", "granite",
                                    "harmony", "hermes", "kimi_k2", "llama3", "mistral", "mistral_v11", "phi4",
                                    "pythonic", "qwen3_coder"))
    reasoning_parser: str = option("auto", "how the model marks its thoughts, which are told from the answer: think is "
                                           "<think></think>; auto looks at its chat template",
                                   ("auto", "think", "mistral", "granite", "harmony", "none"))
    max_stored_responses: int = option(1000, "most responses of /v1/responses that are kept for previous_response_id")
    stored_responses_memory: int | str = option("64MiB", "bytes for the responses that are kept; the oldest make room")
    log_format: str = option("auto", "how the log is written; auto is text on a terminal, else JSON",
                             ("auto", "text", "json"))
    log_level: str = option("info", "least severe kind of log line", ("debug", "info", "warning", "error"))
    register: str | None = option(
        None, "address of a router (`quire route`) that is told again and again that this server is there; both need "
              "the same QUIRE_KV_SECRET")
    advertise: str | None = option(None, "address under which that router reaches this server (default: where it "
                                         "listens)")
    data_parallel_size: int = option(1, "engines behind this one port, each with the model; a request goes to the one "
                                        "that holds most of its prompt and has least to do")
    page: bool = option(True, "the page at / with a chat and a view of the engine, and what it is fed from")
    otlp_endpoint: str | None = option(
        None, "send OpenTelemetry spans to this address, such as http://localhost:4318/v1/traces (default: none)")

    @classmethod
    def create(cls, **options: Any) -> ServerConfig:
        config = cls(**options)
        for f in dataclasses.fields(cls):
            _check_type(f, getattr(config, f.name))
        for name, low, high in _SERVER_RANGES:
            value = getattr(config, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be between {low:g} and {high:g}, not {value}", field=name)
        parse_bytes(config.max_body_size, "max_body_size")
        parse_bytes(config.max_schema_size, "max_schema_size")
        parse_bytes(config.stored_responses_memory, "stored_responses_memory")
        return config


_SERVER_RANGES: tuple[tuple[str, float, float], ...] = (
    ("port", 0, 65535), ("request_timeout", 0.001, 1e6), ("read_timeout", 0.001, 1e6), ("drain_timeout", 0.0, 1e6),
    ("max_connections", 1, 1 << 20), ("max_prompts", 1, 1 << 16), ("max_n", 1, 64), ("max_logprobs", 0, 20),
    ("max_stops", 0, 64), ("max_tools", 0, 1024), ("max_stored_responses", 0, 1 << 20), ("data_parallel_size", 1, 64),
)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`quire route`: who gets a request, and when a server counts as dead."""

    policy: str = option("cache-aware", "who gets a request: who holds most of its prompt and has least to do, the "
                         "least loaded, or each in turn", ("cache-aware", "least-loaded", "round-robin"))
    tokenizer: str | None = option(
        None, "model, folder, tokenizer.json or .gguf whose tokenizer and chat template the servers use, for "
              "cache-aware (default: the model that the servers name, if it can be found here)")
    kv_secret_file: str | None = option(
        None, "file with the secret that the servers were started with, for cache-aware and for servers that register "
              "themselves (default: $QUIRE_KV_SECRET)")
    health_interval: float = option(1.0, "seconds between two questions to a server whether it is well")
    health_timeout: float = option(5.0, "seconds that it may take to answer; after two misses it counts as dead")
    connect_timeout: float = option(5.0, "seconds that a server may take to accept a connection")
    max_retries: int = option(3, "times that a request which has sent nothing is tried on another server")
    max_waiting_requests: int = option(1024, "most requests that wait for their first token; more are refused (429)")
    max_index_blocks: int = option(1 << 22, "most KV blocks that the index remembers, over all servers")

    @classmethod
    def create(cls, **options: Any) -> RouterConfig:
        config = cls(**options)
        for f in dataclasses.fields(cls):
            _check_type(f, getattr(config, f.name))
        for name, low, high in _ROUTER_RANGES:
            value = getattr(config, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} must be between {low:g} and {high:g}, not {value}", field=name)
        _ = config.kv_secret
        return config

    @property
    def kv_secret(self) -> bytes | None:
        return read_kv_secret(self.kv_secret_file)


_ROUTER_RANGES: tuple[tuple[str, float, float], ...] = (
    ("health_interval", 0.05, 3600), ("health_timeout", 0.05, 3600), ("connect_timeout", 0.05, 3600),
    ("max_retries", 0, 64), ("max_waiting_requests", 1, 1 << 20), ("max_index_blocks", 1, 1 << 30),
)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Whether tokens are guessed ahead and checked several at once."""

    speculative_config: dict[str, object] | None = option(  # noqa: RUF009 (a field, as everywhere here)
        None, "guess tokens ahead and check several in one step, as in {\"method\": \"ngram\", "
              "\"num_speculative_tokens\": 8}; methods: ngram, suffix, draft_model, skip_layers (default: off)")

    @property
    def options(self) -> SpeculationOptions | None:
        """What it says, checked; None where there is no speculation."""
        return None if self.speculative_config is None else SpeculationOptions.parse(self.speculative_config)


@dataclass(frozen=True, slots=True)
class StructuredConfig:
    """What compiling the grammars of structured outputs may take, and how many of them are kept."""

    grammar_timeout: float = option(30.0, "most seconds that compiling the grammar of a structured output may take")
    grammar_cache_memory: int | str = option("256MiB", "bytes for compiled grammars, or a text such as 1GiB")
    grammar_threads: int = option(2, "grammars compiled at once")
    grammar_token_ms: float = option(250.0, "most milliseconds of computing that a grammar may take for one token "
                                            "(`quire serve`: a request that needs more fails)")
    grammar_request_timeout: float = option(30.0, "the same in seconds for all tokens of a request")
    grammar_memory: int | str = option("1GiB", "most memory that a grammar may take while it is compiled or followed "
                                               "(`quire serve`)")


_SECTIONS: dict[str, type] = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig,
                              "speculation": SpeculationConfig, "structured": StructuredConfig}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All sections together; build it with `EngineConfig.create(block_size=32, ...)`."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculation: SpeculationConfig = SpeculationConfig()
    structured: StructuredConfig = StructuredConfig()

    @classmethod
    def create(cls, **options: Any) -> EngineConfig:
        """Sort flat keywords into sections; an unknown one raises with the nearest known name."""
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

    def validate(self) -> None:
        for section in (self.model, self.cache, self.scheduler, self.speculation, self.structured):
            for f in dataclasses.fields(section):
                _check_type(f, getattr(section, f.name))
        _check_ranges(self)


def option_fields() -> list[tuple[str, dataclasses.Field[Any]]]:
    """(section name, field) of every option, for the command line and the docs."""
    return [(name, f) for name, section in _SECTIONS.items() for f in dataclasses.fields(section)]


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int),
                                       "dict[str, object]": (dict,)}


def _check_type(f: dataclasses.Field[Any], value: Any) -> None:
    names = [part.strip() for part in str(f.type).split("|")]
    if value is None:
        if "None" not in names:
            raise ConfigError(f"{f.name} may not be None", field=f.name)
        return
    allowed = tuple(t for n in names if n != "None" for t in _TYPES[n])
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{f.name} must be {f.type}, not {type(value).__name__} {value!r}", field=f.name)
    choices = f.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{f.name} must be one of {', '.join(choices)}, not {value!r}", field=f.name)


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
    _check_slo(config.scheduler)
    _check_swap(config)
    _check_structured(config.structured)
    share = config.cache.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}",
                          field="gpu_memory_utilization")
    if config.cache.num_kv_blocks is not None and config.cache.kv_cache_memory is not None:
        raise ConfigError("give num_kv_blocks or kv_cache_memory, not both", field="num_kv_blocks")
    if config.cache.kv_cache_memory is not None:
        parse_bytes(config.cache.kv_cache_memory, "kv_cache_memory")
    _ = config.cache.kv_secret


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


def _check_slo(options: SchedulerConfig) -> None:
    bound = options.itl_slo_ms
    if bound is None:
        return
    if not 0.0 < bound <= 1e6:
        raise ConfigError(f"itl_slo_ms must be above 0 and at most 1000000, not {bound}", field="itl_slo_ms")
    if options.batching_policy != "decode-first" or not options.enable_chunked_prefill:
        raise ConfigError("itl_slo_ms sizes the chunks of prompts beside decoding sequences: it needs "
                          "batching_policy 'decode-first' and enable_chunked_prefill", field="itl_slo_ms")


_MIN_SECRET_BYTES = 16
_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
          "t": 10**12, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: int | str, name: str) -> int:
    """`1500000`, `"512MiB"` or `"2GB"` as a number of bytes."""
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{name} must be a number of bytes or a text like 512MiB or 2GB, not {value!r}", field=name)
        size = int(min(float(match[1]) * _UNITS[match[2].lower()], 1 << 63))
    if not 0 < size < 1 << 63:
        raise ConfigError(f"{name} must be between 1 and 2**63 - 1 bytes, not {value!r:.40}", field=name)
    return size


def default_cache_dir() -> Path:
    """The user's cache folder for models: $QUIRE_CACHE, else $XDG_CACHE_HOME/quire, else ~/.cache/quire."""
    override = os.environ.get("QUIRE_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "quire"


def api_keys_of_environment() -> str:
    """What $QUIRE_API_KEYS holds: API keys of `quire serve`, separated by commas."""
    return os.environ.get("QUIRE_API_KEYS", "")


def replica_key_of_environment() -> str | None:
    """The API key that a router sends to servers with its own questions: $QUIRE_REPLICA_KEY."""
    return os.environ.get("QUIRE_REPLICA_KEY") or None


def read_kv_secret(path: str | None) -> bytes | None:
    """The secret in a file, or in $QUIRE_KV_SECRET where no file is named."""
    if path is None:
        text, where = os.environ.get("QUIRE_KV_SECRET", ""), "$QUIRE_KV_SECRET"
        if not text.strip():
            return None
    else:
        where = f"kv_secret_file {path}"
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}", field="kv_secret_file") from error
    secret = text.strip().encode()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(f"{where} holds {len(secret)} characters, too few for a secret: take at least "
                          f"{_MIN_SECRET_BYTES}, as from `openssl rand -hex 32`", field="kv_secret_file")
    return secret


def default_api_key() -> str | None:
    """The key that commands send to servers, unless told another: $OPENAI_API_KEY, as the field's clients do."""
    return os.environ.get("OPENAI_API_KEY") or None
