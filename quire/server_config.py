"""Every option of the HTTP server and of the router in front of several, documented once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.options import check_type, option, parse_bytes, read_kv_secret


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
            check_type(f, getattr(guard, f.name))
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
        _check(config, _SERVER_RANGES)
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
        _check(config, _ROUTER_RANGES)
        _ = config.kv_secret
        return config

    @property
    def kv_secret(self) -> bytes | None:
        return read_kv_secret(self.kv_secret_file)


_ROUTER_RANGES: tuple[tuple[str, float, float], ...] = (
    ("health_interval", 0.05, 3600), ("health_timeout", 0.05, 3600), ("connect_timeout", 0.05, 3600),
    ("max_retries", 0, 64), ("max_waiting_requests", 1, 1 << 20), ("max_index_blocks", 1, 1 << 30),
)


def _check(config: ServerConfig | RouterConfig, ranges: Iterable[tuple[str, float, float]]) -> None:
    """Every field is of its type, and those with a range lie in it."""
    for f in dataclasses.fields(config):
        check_type(f, getattr(config, f.name))
    for name, low, high in ranges:
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} must be between {low:g} and {high:g}, not {value}", field=name)


def api_keys_of_environment() -> str:
    """What $QUIRE_API_KEYS holds: API keys of `quire serve`, separated by commas."""
    return os.environ.get("QUIRE_API_KEYS", "")


def replica_key_of_environment() -> str | None:
    """The API key that a router sends to servers with its own questions: $QUIRE_REPLICA_KEY."""
    return os.environ.get("QUIRE_REPLICA_KEY") or None


def default_api_key() -> str | None:
    """The key that commands send to servers, unless told another: $OPENAI_API_KEY, as the field's clients do."""
    return os.environ.get("OPENAI_API_KEY") or None
