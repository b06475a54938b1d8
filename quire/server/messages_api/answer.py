"""The answer to a request to /v1/messages: a message with content blocks, or the events that build it."""

from __future__ import annotations

from typing import Any

from quire.engine.outputs.output import CompletionOutput, RequestOutput
from quire.server.answer import Answer, finish_reason, named_sse
from quire.server.api_error import ApiError, ContextExceeded
from quire.server.conversation.conversation import ChoiceText, Conversation, converse, prompt_text
from quire.server.conversation.face import in_words, told_in
from quire.server.conversation.tool_choice import tool_use
from quire.server.messages_api.blocks import ContentBlocks, Event
from quire.server.messages_api.protocol import CountBody, MessagesBody
from quire.server.messages_api.request import WORDS, chat_of
from quire.server.service import RequestRecord, Service

_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
           405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error",
           429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    text = str(error) if error.context is None else _too_long(error.context)
    return {"type": "error", "error": {"type": _ERRORS.get(error.status, "api_error"), "message": text}}


def _too_long(context: ContextExceeded) -> str:
    """In the words by which this API's clients know it: they shorten the conversation, or ask for less output."""
    if context.prompt_alone:
        return f"prompt is too long: {context.prompt} tokens > {context.limit} maximum"
    return (f"input length and `max_tokens` exceed context limit: {context.prompt} + {context.output} > "
            f"{context.limit}, decrease input length or `max_tokens` and try again")


async def message(service: Service, record: RequestRecord, body: MessagesBody) -> Answer:
    """The answer to a request; raises ApiError or InvalidRequestError where there can be none."""
    tokenizer = service.needs_tokenizer("messages")
    with told_in(WORDS):
        chat = chat_of(body, tokenizer.chat_template)
        return MessageAnswer(service, record, await converse(service, record, chat, "msg"), body)


async def count_tokens(service: Service, tenant: str | None, body: CountBody) -> int:
    """The tokens of the prompt that such a request would have."""
    service.check_model(body.model)
    tokenizer = service.needs_tokenizer("messages")
    with told_in(WORDS):
        chat = chat_of(body, tokenizer.chat_template)
        text = await prompt_text(tokenizer, chat, tool_use(chat, service.config))
    return len(await service.encode(text, False, tenant))


class MessageAnswer(Answer):
    def __init__(self, service: Service, record: RequestRecord, conversation: Conversation,
                 body: MessagesBody) -> None:
        super().__init__(service, record, conversation.work, stream=bool(body.stream), options=None)
        self._text = ChoiceText(conversation, service.tokenizer)
        self._blocks = ContentBlocks(body.thinking is not None and body.thinking.type != "disabled")
        self._last: CompletionOutput | None = None

    def events(self, place: int, output: RequestOutput) -> bytes:
        found: list[Event] = []
        if not self._text.started:
            self._text.started = True
            started = {**self._message(), "usage": {**self._usage(), "output_tokens": 0}}
            found = [{"type": "message_start", "message": started}, {"type": "ping"}]
        for each in output.outputs:
            reason = finish_reason(each)
            found += self._blocks.push(self._text.push(each.text_delta, each.token_ids_delta, reason is not None))
            if reason is not None:
                self._last = each
                found += self._blocks.end()
        return b"".join(map(named_sse, found))

    def tail(self) -> bytes:
        ended = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return named_sse(ended) + named_sse({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return named_sse(error_body(in_words(error, WORDS)))

    def whole(self, found: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        self._last = found[0].outputs[0]
        finish_reason(self._last)
        self._blocks.push(self._text.push(self._last.text, self._last.token_ids, True))
        self._blocks.end()
        return {**self._message(), "content": self._blocks.blocks(), **self._end(), "usage": self._usage()}

    def _message(self) -> dict[str, Any]:
        return {"id": self.work.request_id, "type": "message", "role": "assistant", "model": self.service.model_name,
                "content": [], "stop_reason": None, "stop_sequence": None}

    def _end(self) -> dict[str, Any]:
        """How it ended, in Anthropic's words."""
        assert self._last is not None
        sequence = self._last.stop_reason if isinstance(self._last.stop_reason, str) else None
        if self._last.finish_reason == "length":
            reason = "max_tokens"
        elif self._text.num_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage_body()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"]}
