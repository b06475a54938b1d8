"""What all routes share: the engine, the model's name, limits, counters, and whether the server is closing."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from quire.options import parse_bytes
from quire.server.access.auth import ApiKeys
from quire.server.access.places import Places
from quire.server.api_error import ApiError, ContextExceeded
from quire.server.long_texts.text_process import start_text_process
from quire.server.long_texts.text_work import TextWork
from quire.server.parsers.registry import call_format_of, thought_format_of
from quire.server.responses_api.store import ResponseStore
from quire.server.telemetry.metrics import ServerMetrics
from quire.server.telemetry.tracing import Tracing
from quire.server_config import ServerConfig

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.tokenizer.tokenizer import Tokenizer

LONG_TEXT = 4096
"""Characters, or tokens: working on more than this would hold up the other streams."""
_CUT_TOKENS = 64
"""So many tokens at most differ between a text and its beginning, where that is cut."""


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, for the log, the metrics and the span."""

    request_id: str
    method: str
    path: str
    tenant: str | None = None
    status: int = 0
    started: float = field(default_factory=time.perf_counter)
    facts: dict[str, Any] = field(default_factory=dict)
    prefill: tuple[str, ...] | None = None
    """Engines that it asks for the prompt, where it names some."""
    suffix: str = ""
    """What makes the engine's name for it unique, where the client has chosen its id."""

    @property
    def unique_id(self) -> str:
        return self.request_id + self.suffix


class Service:
    def __init__(self, engine: Any, config: ServerConfig, keys: ApiKeys | None = None,
                 tracing: Tracing | None = None) -> None:
        self.engine = engine
        self.engine_config: EngineConfig | None = engine.config
        self.config = config
        self.keys = ApiKeys() if keys is None else keys
        self.tracing = Tracing() if tracing is None else tracing
        self.model_name: str = config.served_model_name or engine.model_name
        self.metrics = ServerMetrics(self.model_name)
        engine.on_step_stats = self.metrics.count_step
        self.text_work = (None if engine.options is None or engine.tokenizer is None
                          else TextWork(functools.partial(start_text_process, engine.options)))
        """Who works on long texts; None where the engine cannot say how to read its tokenizer in another process."""
        self.kv_readers = Places(32, "too many read this server's KV events: try again later", "too_many_readers")
        self.created = int(time.time())
        self.draining = False
        self.document: bytes | None = None
        """The OpenAPI document, made at the first request for it."""
        self.active: set[asyncio.Task[Any]] = set()
        """Tasks that answer requests to the engine now."""
        self.ending: set[asyncio.Task[Any]] = set()
        """Those of them that are cancelled because the server closes."""
        if self.tokenizer is not None:
            _ = self.tokenizer.vocab_size  # found once, which takes a while
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        self.responses = ResponseStore(config.max_stored_responses,
                                       parse_bytes(config.stored_responses_memory, "stored_responses_memory"))
        # A template that knows no tools says nothing of calls: the model is asked for Hermes', whatever its family.
        tool_template = None if self.tokenizer is None else self.tokenizer.tool_template
        self.call_format = (call_format_of(tool_template) if config.tool_call_parser == "auto"
                            else config.tool_call_parser)
        self.thought_format = (thought_format_of(template) if config.reasoning_parser == "auto"
                               else config.reasoning_parser)

    @property
    def tokenizer(self) -> Tokenizer | None:
        found: Tokenizer | None = self.engine.tokenizer
        return found

    def needs_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, f"this server has no tokenizer (skip_tokenizer_init): {param} cannot be used",
                           param=param)
        return self.tokenizer

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(404, f"the model {name!r:.200} does not exist; this server has {self.model_name!r}",
                           param="model", code="model_not_found")

    async def encode(self, text: str, add_special_tokens: bool = True, tenant: str | None = None) -> list[int]:
        """Token ids; long texts are worked on in another process, beside the streams."""
        return (await self._encode_all([text], add_special_tokens, tenant))[0]

    async def encode_prompt(self, text: str, param: str, add_special_tokens: bool = True,
                            tenant: str | None = None) -> list[int]:
        """As `encode`. A prompt far beyond the context is refused by its beginning: all of it may take seconds."""
        longest = self.engine.max_model_len
        for characters in (8 * longest, 32 * longest):
            if len(text) <= characters:
                break
            count = len(await self.encode(text[:characters], add_special_tokens, tenant))
            if count > longest + _CUT_TOKENS:
                raise self._too_long(f"more than {count - _CUT_TOKENS}", True, None, param)
        return await self.encode(text, add_special_tokens, tenant)

    async def encode_prompts(self, texts: list[str], param: str, add_special_tokens: bool = True,
                             tenant: str | None = None) -> list[list[int]]:
        """As `encode_prompt`, of several at once: many short ones take as long as a long one."""
        if any(len(text) > 8 * self.engine.max_model_len for text in texts):
            return [await self.encode_prompt(text, param, add_special_tokens, tenant) for text in texts]
        return await self._encode_all(texts, add_special_tokens, tenant)

    async def _encode_all(self, texts: list[str], special: bool, tenant: str | None) -> list[list[int]]:
        tokenizer = self.needs_tokenizer("prompt")
        if sum(map(len, texts)) < LONG_TEXT:
            return [tokenizer.encode(text, special) for text in texts]
        if self.text_work is None:
            return [await asyncio.to_thread(tokenizer.encode, text, special) for text in texts]
        data = await self.text_work.do(tenant, {"do": "encode", "texts": texts, "special": special})
        return [array("I", found).tolist() for found in msgspec.msgpack.decode(data)]

    async def decode(self, tokens: list[int], skip_special_tokens: bool, tenant: str | None = None) -> str:
        """The text of token ids; that of many is made in another process."""
        tokenizer = self.needs_tokenizer("tokens")
        if len(tokens) < LONG_TEXT:
            return tokenizer.decode(tokens, skip_special_tokens)
        if self.text_work is None:
            return await asyncio.to_thread(tokenizer.decode, tokens, skip_special_tokens)
        data = await self.text_work.do(tenant, {"do": "decode", "tokens": array("I", tokens).tobytes(),
                                                "skip_special": skip_special_tokens})
        return data.decode()

    def close(self) -> None:
        self.metrics.loop_lag.close()
        if self.text_work is not None:
            self.text_work.close()

    def check_length(self, num_prompt: int, max_tokens: int | None, param: str) -> None:
        """Refuse what is longer than the model's context, as OpenAI does."""
        longest = self.engine.max_model_len
        wanted = num_prompt + (1 if max_tokens is None else max(max_tokens, 1))
        if wanted > longest:
            raise self._too_long(str(num_prompt), num_prompt >= longest, max_tokens, param)

    def _too_long(self, has: str, alone: bool, max_tokens: int | None, param: str) -> ApiError:
        longest = self.engine.max_model_len
        asked = "at least 1" if max_tokens is None else str(max_tokens)
        return ApiError(
            400, f"this model's context is {longest} tokens, and the request asks for {has} in "
                 f"{param} and {asked} to generate: shorten {param} or lower max_tokens", param=param,
            code="context_length_exceeded", context=ContextExceeded(has, alone, max_tokens or 1, longest))

    def timeout(self, wanted: float | None) -> float:
        return self.config.request_timeout if wanted is None else min(wanted, self.config.request_timeout)


def salt_of(tenant: str | None, salt: str | None) -> str | None:
    """The salt of a request's prefixes: one key never hits what another has cached."""
    if tenant is None:
        return salt
    parts = f"{len(tenant)}:{tenant}:{'' if salt is None else 'salt:' + salt}"
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()
