"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from quire.engine.outputs.output import CompletionOutput, RequestOutput
from quire.server.answer import Answer, encode, finish_reason, new_logprobs, sse
from quire.server.conversation.conversation import ChoiceText, Conversation, converse
from quire.server.openai_api.chat_protocol import ChatBody
from quire.server.openai_api.logprobs import chat_logprobs
from quire.server.parsers.pieces import CallDelta, Content, Piece, Thought
from quire.server.service import RequestRecord, Service


async def chat_completion(service: Service, record: RequestRecord, body: ChatBody) -> Answer:
    """The answer to a request; raises ApiError or InvalidRequestError where there can be none."""
    return ChatAnswer(service, record, await converse(service, record, body, "chatcmpl"), body)


class ChatAnswer(Answer):
    def __init__(self, service: Service, record: RequestRecord, conversation: Conversation, body: ChatBody) -> None:
        work = conversation.work
        super().__init__(service, record, work, stream=bool(body.stream), options=body.stream_options)
        self._body = body
        self._conversation = conversation
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
            self._texts[index] = ChoiceText(self._conversation, self.service.tokenizer)
        return self._texts[index]

    def usage_body(self) -> dict[str, Any]:
        found = super().usage_body()
        if self._conversation.format.thoughts != "none":
            thoughts = sum(text.num_thought_tokens() for text in self._texts.values())
            found["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return found

    def events(self, place: int, output: RequestOutput) -> bytes:
        found = b""
        for each in output.outputs[:self._n]:
            text = self._choice(each.index)
            if not text.started:
                text.started = True
                found += self._chunk(each.index, {"role": "assistant", "content": ""}, prompt=output.prompt_token_ids)
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
        delta = _delta(text.push(each.text_delta, each.token_ids_delta, reason is not None))
        found = b""
        logprobs = chat_logprobs(new_logprobs(each), self._top, self.service.tokenizer) if self._body.logprobs else None
        told = self._body.logprobs or self._body.return_token_ids
        if delta or (told and each.token_ids_delta):
            found = self._chunk(each.index, delta, None, logprobs, each)
        if reason is not None:
            found += self._chunk(each.index, {}, self._reason(reason, text))
        return found

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None,
               logprobs: dict[str, Any] | None = None, each: CompletionOutput | None = None,
               prompt: list[int] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if self._body.return_token_ids:
            choice["token_ids"] = [] if each is None else each.token_ids_delta
            choice |= {} if prompt is None else {"prompt_token_ids": prompt}
        return sse({**self._head, "choices": [choice], **self.chunk_usage()})

    def _reason(self, reason: str, text: ChoiceText) -> str:
        called = text.num_calls > 0 and self._conversation.tools.mode != "named"
        return "tool_calls" if called and reason == "stop" else reason

    def last_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, found: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._whole_choice(each, found[0]) for each in found[0].outputs[:self._n]]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self.usage_body()}

    def _whole_choice(self, each: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        text = self._choice(each.index)
        reason = finish_reason(each)
        message = {"role": "assistant", "refusal": None,
                   **_message(text.push(each.text, each.token_ids, True))}
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(each.logprobs or [], self._top, self.service.tokenizer)
        choice: dict[str, Any] = {"index": each.index, "message": message, "logprobs": logprobs,
                                  "finish_reason": self._reason(reason or "stop", text)}
        if self._body.return_token_ids:
            choice["token_ids"] = each.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice


def _delta(pieces: list[Piece]) -> dict[str, Any]:
    """Pieces as the delta of one chunk: clients that add chunks up expect each call once in it."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallDelta):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            if piece.id is not None:
                call["function"]["name"] = piece.name
                call.update(id=piece.id, type="function")
            call["function"]["arguments"] += piece.arguments
        elif isinstance(piece, Thought):
            # The field has two names for it: the older one, and the one that agents read.
            delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + piece.text
        else:
            delta["content"] = delta.get("content", "") + piece.text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})


def _message(pieces: list[Piece]) -> dict[str, Any]:
    """Pieces as the parts of a whole message."""
    found = _delta(pieces)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls = [{"id": call["id"], "type": "function", "function": call["function"]}
             for call in found.pop("tool_calls", [])]
    return {**found, "content": content or (None if calls else ""), **({"tool_calls": calls} if calls else {})}
