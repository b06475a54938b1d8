"""What all routes share: the engine, the model's name, limits, counters, and whether the server is closing."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.config import ServerConfig, parse_bytes
from quire.server.api_error import ApiError
from quire.server.auth import ApiKeys
from quire.server.metrics import ServerMetrics
from quire.server.parsers.registry import call_format_of, thought_format_of
from quire.server.responses_api.store import ResponseStore
from quire.server.tracing import Tracing

if TYPE_CHECKING:
    from quire.tokenizer.tokenizer import Tokenizer

_LONG_TEXT = 4096
"""Characters: tokenizing more than this would hold up the other streams."""
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
    suffix: str = ""
    """What makes the engine's name for it unique, where the client has chosen its id."""

    @property
    def unique_id(self) -> str:
        return self.request_id + self.suffix


class Service:
    def __init__(self, engine: Any, config: ServerConfig, keys: ApiKeys | None = None,
                 tracing: Tracing | None = None) -> None:
        self.engine = engine
        self.config = config
        self.keys = ApiKeys() if keys is None else keys
        self.tracing = Tracing() if tracing is None else tracing
        self.model_name: str = config.served_model_name or engine.model_name
        self.metrics = ServerMetrics(self.model_name)
        engine.on_step_stats = self.metrics.count_step
        self.created = int(time.time())
        self.draining = False
        self.document: bytes | None = None
        """The OpenAPI document, once somebody has asked for it."""
        self.active: set[asyncio.Task[Any]] = set()
        """Tasks that answer requests to the engine now."""
        self.ending: set[asyncio.Task[Any]] = set()
        """Those of them that are cancelled because the server closes."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        self.responses = ResponseStore(config.max_stored_responses,
                                       parse_bytes(config.stored_responses_memory, "stored_responses_memory"))
        self.call_format = call_format_of(template) if config.tool_call_parser == "auto" else config.tool_call_parser
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

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; long texts are worked on in a thread, beside the streams."""
        tokenizer = self.needs_tokenizer("prompt")
        if len(text) < _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def encode_prompt(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`. A prompt far beyond the context is refused by its beginning: all of it may take seconds."""
        longest = self.engine.max_model_len
        for characters in (8 * longest, 32 * longest):
            if len(text) <= characters:
                break
            count = len(await self.encode(text[:characters], add_special_tokens))
            if count > longest + _CUT_TOKENS:
                raise self._too_long(f"more than {count - _CUT_TOKENS}", "at least 1", param)
        return await self.encode(text, add_special_tokens)

    def check_length(self, num_prompt: int, max_tokens: int | None, param: str) -> None:
        """Refuse what is longer than the model's context, as OpenAI does."""
        longest = self.engine.max_model_len
        wanted = num_prompt + (1 if max_tokens is None else max(max_tokens, 1))
        if wanted > longest:
            raise self._too_long(str(num_prompt), "at least 1" if max_tokens is None else str(max_tokens), param)

    def _too_long(self, has: str, asked: str, param: str) -> ApiError:
        return ApiError(
            400, f"this model's context is {self.engine.max_model_len} tokens, and the request asks for {has} in "
                 f"{param} and {asked} to generate: shorten {param} or lower max_tokens", param=param,
            code="context_length_exceeded")

    def timeout(self, wanted: float | None) -> float:
        return self.config.request_timeout if wanted is None else min(wanted, self.config.request_timeout)


def salt_of(tenant: str | None, salt: str | None) -> str | None:
    """The salt of a request's prefixes: nobody sees what is cached for another key."""
    if tenant is None:
        return salt
    parts = f"{len(tenant)}:{tenant}:{'' if salt is None else 'salt:' + salt}"
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()
