"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.engine.output import CompletionOutput, RequestOutput
from quire.server.answer import Answer, encode, finish_reason, new_logprobs, sse
from quire.server.api_error import refusal
from quire.server.chat_prompt import knows, render
from quire.server.chat_protocol import ChatBody
from quire.server.generation import Work
from quire.server.logprobs import chat_logprobs
from quire.server.parameters import Wishes, constraint_of, engine_params
from quire.server.reasoning import OPEN, ReasoningSplitter
from quire.server.service import RequestRecord, Service, salt_of
from quire.server.tool_choice import ToolUse, tool_use
from quire.server.tool_parser import CallDelta

_MANY_CHARACTERS = 16384


async def chat_completion(service: Service, record: RequestRecord, body: ChatBody) -> Answer:
    """The answer to a request; raises ApiError or InvalidRequestError where there can be none."""
    service.check_model(body.model)
    tools = tool_use(body, service.tool_format, service.config)
    max_tokens = _max_tokens(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs", "needs logprobs")
    text = await _prompt(service, body, tools) + tools.opening
    tokens = await service.encode_prompt(text, "messages", add_special_tokens=False, tenant=record.tenant)
    service.check_length(len(tokens), max_tokens, "messages")
    if max_tokens is None and body.use_beam_search:
        max_tokens = service.engine.max_model_len - len(tokens)
    wishes = Wishes(max_tokens=max_tokens, best_of=body.best_of, constraint=tools.constraint,
                    logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                    skip_special_tokens=False if tools.keeps_special_tokens else None)
    params = engine_params(body, wishes, service.config)
    constraint = tools.constraint or constraint_of(body, service.config)
    field = None if constraint is None else constraint[0]
    work = Work(f"chatcmpl-{record.unique_id}", [tokens], params, body.priority or 0, record.tenant,
                salt_of(record.tenant, body.cache_salt), service.timeout(body.timeout), field, bool(body.stream),
                "messages")
    splits = service.splits_reasoning and constraint is None  # a shape leaves no room for thoughts
    return ChatAnswer(service, record, work, body, tools, splits=splits, thinking=text.rstrip().endswith(OPEN))


def _max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None \
            and body.max_tokens != body.max_completion_tokens:
        raise refusal("max_tokens", "contradicts max_completion_tokens: give one of them")
    found = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if found == 0:
        raise refusal("max_tokens", "must be at least 1")
    return found


async def _prompt(service: Service, body: ChatBody, tools: ToolUse) -> str:
    tokenizer = service.needs_tokenizer("messages")
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        if not knows(tokenizer.chat_template, "reasoning_effort"):
            raise refusal("reasoning_effort", "is not supported by this model's chat template",
                          code="unsupported_parameter")
        variables["reasoning_effort"] = body.reasoning_effort
    size = sum(len(message.content or "") for message in body.messages)

    def work() -> str:
        return render(tokenizer, body.messages, tools=tools.shown, variables=variables,
                      add_generation_prompt=body.add_generation_prompt is not False)

    small = size < _MANY_CHARACTERS and len(body.messages) < 100
    return work() if small else await asyncio.to_thread(work)


class ChoiceText:
    """One choice's text on its way: thoughts, tool calls and content told apart."""

    __slots__ = ("_parser", "_splitter", "started")

    def __init__(self, tools: ToolUse, splits: bool, thinking: bool) -> None:
        self._splitter = ReasoningSplitter(thinking) if splits else None
        self._parser = tools.parser()
        self.started = False

    @property
    def plain(self) -> bool:
        return self._splitter is None and self._parser is None

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls

    def push(self, text: str, last: bool) -> tuple[str, str, list[CallDelta]]:
        """(reasoning, content, pieces of calls) that new text gives."""
        reasoning = ""
        calls: list[CallDelta] = []
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            if last:
                more, rest = self._splitter.finish()
                reasoning, text = reasoning + more, text + rest
        if self._parser is not None:
            text, calls = self._parser.push(text)
            if last:
                rest, more_calls = self._parser.finish()
                text, calls = text + rest, calls + more_calls
        return reasoning, text, calls


class ChatAnswer(Answer):
    def __init__(self, service: Service, record: RequestRecord, work: Work, body: ChatBody, tools: ToolUse, *,
                 splits: bool, thinking: bool) -> None:
        super().__init__(service, record, work, stream=bool(body.stream), options=body.stream_options)
        self._body = body
        self._tools = tools
        self._splits = splits
        self._thinking = thinking
        self._n = body.n or 1
        self._top = body.top_logprobs or 0
        self._texts: dict[int, ChoiceText] = {}
        self._head = {"id": work.request_id, "created": self.created, "model": service.model_name,
                      "system_fingerprint": None, "object": "chat.completion.chunk"}
        self._plain = not body.logprobs and not body.return_token_ids and not self.usage_in_each
        tail = b',"usage":null' if self.include_usage else b""
        self._chunk_start = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":%d,"delta":{"content":'
        self._chunk_end = b'},"logprobs":null,"finish_reason":null}]' + tail + b"}\n\n"

    def _choice(self, index: int) -> ChoiceText:
        if index not in self._texts:
            self._texts[index] = ChoiceText(self._tools, self._splits, self._thinking)
        return self._texts[index]

    def events(self, place: int, output: RequestOutput) -> bytes:
        found = b""
        for each in output.outputs[:self._n]:
            text = self._choice(each.index)
            if not text.started:
                text.started = True
                found += self._chunk(each.index, {"role": "assistant", "content": ""})
            if self._plain and text.plain:
                if each.text_delta:
                    found += self._chunk_start % each.index + encode(each.text_delta) + self._chunk_end
                if each.finish_reason is not None:
                    found += self._chunk(each.index, {}, finish_reason(each))
            else:
                found += self._event(each, text)
        return found

    def _event(self, each: CompletionOutput, text: ChoiceText) -> bytes:
        reason = finish_reason(each)
        reasoning, content, calls = text.push(each.text_delta, reason is not None)
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [_call_piece(call) for call in _merged(calls)]
        found = b""
        logprobs = chat_logprobs(new_logprobs(each), self._top, self.service.tokenizer) if self._body.logprobs else None
        told = self._body.logprobs or self._body.return_token_ids
        if delta or (told and each.token_ids_delta):
            found = self._chunk(each.index, delta, None, logprobs, each)
        if reason is not None:
            found += self._chunk(each.index, {}, self._reason(reason, text))
        return found

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None,
               logprobs: dict[str, Any] | None = None, each: CompletionOutput | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if self._body.return_token_ids:
            choice["token_ids"] = [] if each is None else each.token_ids_delta
        return sse({**self._head, "choices": [choice], **self.chunk_usage()})

    def _reason(self, reason: str, text: ChoiceText) -> str:
        called = text.num_calls > 0 and self._tools.mode != "named"
        return "tool_calls" if called and reason == "stop" else reason

    def last_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, found: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._whole_choice(each, found[0]) for each in found[0].outputs[:self._n]]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _whole_choice(self, each: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        text = self._choice(each.index)
        reason = finish_reason(each)
        reasoning, content, calls = text.push(each.text, True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = _joined_calls(calls)
            message["content"] = content or None
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(each.logprobs or [], self._top, self.service.tokenizer)
        choice: dict[str, Any] = {"index": each.index, "message": message, "logprobs": logprobs,
                                  "finish_reason": self._reason(reason or "stop", text)}
        if self._body.return_token_ids:
            choice["token_ids"] = each.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice


def _merged(calls: list[CallDelta]) -> list[CallDelta]:
    """One piece for each call: clients that add chunks up expect an index once in each."""
    found: dict[int, CallDelta] = {}
    for call in calls:
        first = found.setdefault(call.index, call)
        if first is not call:
            first.arguments += call.arguments
    return list(found.values())


def _call_piece(call: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    piece: dict[str, Any] = {"index": call.index, "function": function}
    if call.id is not None:
        function["name"] = call.name
        piece.update(id=call.id, type="function")
    return piece


def _joined_calls(calls: list[CallDelta]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for call in calls:
        if call.id is not None:
            found.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
        found[-1]["function"]["arguments"] += call.arguments
    return found
