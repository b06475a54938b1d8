"""From a conversation to work for the engine, and from what the engine writes to thoughts, content and calls.

Chat completions, responses and messages are three faces of this: each brings its request into the words of a
ChatBody, and writes the same pieces in its own shape.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quire.server.api_error import refusal
from quire.server.conversation.chat_prompt import knows, render
from quire.server.conversation.shapes import Marks, whole_shape
from quire.server.conversation.tool_choice import ToolUse, tool_use
from quire.server.generation import Work
from quire.server.openai_api.chat_protocol import AssistantMessage, ChatBody
from quire.server.openai_api.parameters import Wishes, check_size, engine_params, shape_of
from quire.server.parsers.pieces import Content, Piece
from quire.server.parsers.reader import OutputParser
from quire.server.parsers.registry import OutputFormat
from quire.server.parsers.thoughts import THOUGHTS
from quire.server.service import RequestRecord, Service, salt_of
from quire.tokenizer.tokenizer import Tokenizer

_MANY_CHARACTERS = 16384
_PROMPT_END = 32
"""Tokens at the end of a prompt: enough to see whether it has opened the model's thoughts."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request ready for the engine, and how to read what comes back."""

    work: Work
    tools: ToolUse
    format: OutputFormat
    keeps_special_tokens: bool
    """The text has its special tokens."""


async def converse(service: Service, record: RequestRecord, body: ChatBody, kind: str) -> Conversation:
    """`kind` begins the request's name. Raises ApiError or InvalidRequestError for what cannot be."""
    service.check_model(body.model)
    tokenizer = service.needs_tokenizer("messages")
    tools = tool_use(body, service.config)
    max_tokens = _max_tokens(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs", "needs logprobs")
    tokens, end = await _prompt(service, tokenizer, body, tools, record.tenant)
    prompt_field = "messages" if body.prompt_token_ids is None else "prompt_token_ids"
    service.check_length(len(tokens), max_tokens, prompt_field)
    if max_tokens is None and body.use_beam_search:
        max_tokens = service.engine.max_model_len - len(tokens)
    form = _format(service, tools, end)
    given = shape_of(body, service.config)
    if tools.forced or (given is not None and tools.shapes):
        check_size("tools", [tool.schema for tool in tools.shapes], service.config)
    marks, keeps = THOUGHTS.get(form.thoughts), _keeps_special_tokens(form, tokenizer)
    shape = whole_shape(given, tools, service.call_format, form.thoughts, opened=form.opened,
                        closed=marks is not None and marks.closed_by(end), mark=Marks(tokenizer))
    wishes = Wishes(max_tokens=max_tokens, best_of=body.best_of, shape=None if shape is None else shape[1],
                    logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                    skip_special_tokens=False if keeps else None)
    params = engine_params(body, wishes, service.config)
    work = Work(f"{kind}-{record.unique_id}", [tokens], params, body.priority or 0, record.tenant,
                salt_of(record.tenant, body.cache_salt), service.timeout(body.timeout),
                None if shape is None else shape[0], bool(body.stream), prompt_field, record.prefill)
    return Conversation(work, tools, form, keeps or body.skip_special_tokens is False)


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None \
            and body.max_tokens != body.max_completion_tokens:
        raise refusal("max_tokens", "contradicts max_completion_tokens: give one of them")
    found = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if found == 0:
        raise refusal("max_tokens", "must be at least 1")
    return found


async def _prompt(service: Service, tokenizer: Tokenizer, body: ChatBody, tools: ToolUse,
                  tenant: str | None) -> tuple[list[int], str]:
    """The prompt's tokens, and its end as text."""
    if body.prompt_token_ids is not None:
        if body.messages is not None:
            raise refusal("prompt_token_ids", "stands in place of messages: leave these out")
        tokens = body.prompt_token_ids
        return tokens, tokenizer.decode(tokens[-_PROMPT_END:], skip_special_tokens=False)
    text = await prompt_text(tokenizer, body, tools)
    tokens = await service.encode_prompt(text, "messages", add_special_tokens=False, tenant=tenant)
    return tokens, text[-256:]


async def prompt_text(tokenizer: Tokenizer, body: ChatBody, tools: ToolUse) -> str:
    """The conversation as the model's chat template writes it."""
    messages = body.messages
    if messages is None:
        raise refusal("messages", "is missing", code="missing_required_parameter")
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not knows(tokenizer.chat_template, "reasoning_effort"):
            raise refusal("reasoning_effort", "is not supported by this model's chat template",
                          code="unsupported_parameter")
        variables["reasoning_effort"] = body.reasoning_effort
    size = sum(len(message.content or "") for message in messages)
    size += sum(len(call.function.arguments) for message in messages if isinstance(message, AssistantMessage)
                for call in message.tool_calls or ())

    def work() -> str:
        return render(tokenizer, messages, tools=tools.shown, variables=variables,
                      add_generation_prompt=body.add_generation_prompt is not False)

    small = size < _MANY_CHARACTERS and len(messages) < 100 and len(tools.shapes) < 10
    return work() if small else await asyncio.to_thread(work)


def _format(service: Service, tools: ToolUse, prompt_end: str) -> OutputFormat:
    marks = THOUGHTS.get(service.thought_format)
    return OutputFormat(
        calls=None if tools.mode == "none" else service.call_format,
        thoughts=service.thought_format,
        opened=marks is not None and marks.opened_by(prompt_end),
        tools={tool.name: tool.schema for tool in tools.shapes},
        most=None if tools.several else 1, forced=tools.forced)


def _keeps_special_tokens(form: OutputFormat, tokenizer: Tokenizer) -> bool:
    """Are there special tokens in the text that tell thoughts and calls apart?"""
    marks = THOUGHTS.get(form.thoughts)
    return form.keeps_special_tokens or (marks is not None and tokenizer.special_id(marks.close) is not None)


class ChoiceText:
    """One choice's text on its way: thoughts, content and calls told apart, and counted."""

    __slots__ = ("_keeps_special", "_parser", "_tokenizer", "_tokens", "started")

    def __init__(self, conversation: Conversation, tokenizer: Tokenizer | None) -> None:
        form = conversation.format
        self._parser: OutputParser | None = None if form.plain else form.parser()
        self._tokenizer = tokenizer if form.thoughts != "none" else None
        self._keeps_special = conversation.keeps_special_tokens
        self._tokens: list[int] = []
        self.started = False

    @property
    def plain(self) -> bool:
        return self._parser is None

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls

    def push(self, text: str, tokens: list[int], last: bool) -> list[Piece]:
        """What new text gives, in its order."""
        if self._parser is None:
            return [Content(text)] if text else []
        if self._tokenizer is not None:
            self._tokens += tokens
        return self._parser.push(text) + (self._parser.finish() if last else [])

    def num_thought_tokens(self) -> int:
        """Tokens up to the end of the thoughts, as soon as they have ended."""
        size = 0 if self._parser is None else self._parser.thought_bytes
        if not size or self._tokenizer is None:
            return 0
        hidden: frozenset[int] = frozenset() if self._keeps_special else self._tokenizer.special_ids
        for count, token in enumerate(self._tokens, start=1):
            size -= 0 if token in hidden else len(self._tokenizer.token_bytes(token))
            if size <= 0:
                return count
        return len(self._tokens)

