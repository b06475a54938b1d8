"""From the body of a request to the tokens of its prompt, as the servers make them: the same template, the same text.

What cannot be read is no error here: the request is routed by load, and a server says what is wrong with it.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from quire.errors import QuireError
from quire.kvcache.prefix import cache_key
from quire.server.conversation.conversation import prompt_text
from quire.server.conversation.tool_choice import tool_use
from quire.server.long_texts.text_process import start_text_process
from quire.server.long_texts.text_work import TextWork
from quire.server.messages_api.protocol import MessagesBody
from quire.server.messages_api.request import chat_of as chat_of_message
from quire.server.openai_api.chat_protocol import ChatBody
from quire.server.openai_api.protocol import CompletionBody
from quire.server.responses_api.protocol import ResponsesBody
from quire.server.responses_api.request import chat_of as chat_of_response
from quire.server.responses_api.request import items_of
from quire.server.service import LONG_TEXT, salt_of
from quire.server_config import ServerConfig
from quire.tokenizer.tokenizer import Tokenizer

_CHARACTERS_PER_TOKEN = 8
"""A text with more than so many for each token of the context is refused by any server: it is not tokenized here."""
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody}


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as an engine's cache sees it."""

    tokens: list[int]
    root: bytes
    """Where the chain of names begins: prompts under different keys or salts have no block in common."""
    others: int = 0
    """Tokens of the request's other prompts."""


class PromptReader:
    """`tokenizer` None: only prompts that are given as tokens can be read."""

    def __init__(self, tokenizer: Tokenizer | None, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._text_work = (None if tokenizer is None or options is None
                           else TextWork(functools.partial(start_text_process, options)))
        """Who works on long texts, beside the streams."""
        self._config = ServerConfig()

    async def read(self, path: str, body: bytes, tenant: str | None, max_tokens: int | None) -> PromptTokens | None:
        """None where there is no prompt that could be read. `max_tokens`: the servers' context."""
        kind = _BODIES.get(path)
        if kind is None:
            return None
        try:
            return await self._read(kind.model_validate_json(body), tenant, max_tokens)
        except (ValidationError, QuireError, RecursionError, ValueError):
            return None

    async def _read(self, body: Any, tenant: str | None, max_tokens: int | None) -> PromptTokens | None:
        salt = salt_of(tenant, body.cache_salt)
        root = b"" if salt is None else cache_key(["salt", salt])
        if isinstance(body, CompletionBody):
            return await self._completion(body, root, tenant, max_tokens)
        chat = self._chat(body)
        if chat.prompt_token_ids is not None:
            return PromptTokens(chat.prompt_token_ids, root)
        if self._tokenizer is None:
            return None
        text = await prompt_text(self._tokenizer, chat, tool_use(chat, self._config))
        tokens = await self._encode(text, False, tenant, max_tokens)
        return None if tokens is None else PromptTokens(tokens, root)

    def _chat(self, body: Any) -> ChatBody:
        template = None if self._tokenizer is None else self._tokenizer.chat_template
        if isinstance(body, ResponsesBody):
            return chat_of_response(body, items_of(body), template)
        return chat_of_message(body, template) if isinstance(body, MessagesBody) else body

    async def _completion(self, body: CompletionBody, root: bytes, tenant: str | None,
                          max_tokens: int | None) -> PromptTokens | None:
        """Of several prompts the first one counts: they mostly begin alike."""
        given: Any = body.prompt if body.prompt_token_ids is None else body.prompt_token_ids
        several: list[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        first = several[0]
        tokens = first if isinstance(first, list) else await self._encode(
            first, body.add_special_tokens is not False, tenant, max_tokens)
        others = sum(len(each) // (1 if isinstance(each, list) else 4) for each in several[1:])
        return None if tokens is None else PromptTokens(tokens, root, others)

    async def _encode(self, text: str | None, special: bool, tenant: str | None,
                      max_tokens: int | None) -> list[int] | None:
        if text is None or self._tokenizer is None:
            return None
        if max_tokens is not None and len(text) > _CHARACTERS_PER_TOKEN * max_tokens:
            return None
        if len(text) < LONG_TEXT or self._text_work is None:
            return self._tokenizer.encode(text, special)
        data = await self._text_work.do(tenant, {"do": "encode", "texts": [text], "special": special})
        found: list[int] = array("I", msgspec.msgpack.decode(data)[0]).tolist()
        return found

    def close(self) -> None:
        if self._text_work is not None:
            self._text_work.close()


def load_tokenizer(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer by the name of its model, folder or file, and the options that say so to another process."""
    from quire.models.loader.source import resolve_model

    options = {"model": name, "load_format": "dummy"}  # the weights are not wanted
    return resolve_model(name, load_format="dummy", progress=False).tokenizer(), options


def on_this_machine(name: str) -> bool:
    """Can the model of that name be read without fetching anything?"""
    from pathlib import Path

    from quire.models.loader.catalog import CATALOG
    from quire.models.loader.pull import cached_file

    entry = CATALOG.get(name)
    return Path(name).exists() or (entry is not None and cached_file(entry, None) is not None)


