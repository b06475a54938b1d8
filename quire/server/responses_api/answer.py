"""The answer to a request to /v1/responses: an object with output items, or the events that build it."""

from __future__ import annotations

import time
from typing import Any

from pydantic import TypeAdapter

from quire.engine.outputs.output import CompletionOutput, RequestOutput
from quire.server.answer import Answer, encode, finish_reason, named_sse
from quire.server.api_error import ApiError
from quire.server.conversation.conversation import ChoiceText, Conversation, converse
from quire.server.conversation.face import in_words, told_in
from quire.server.responses_api.items import Event, OutputItems
from quire.server.responses_api.protocol import InputItem, ResponsesBody
from quire.server.responses_api.request import WORDS, chat_of, items_of, namespaces_of
from quire.server.responses_api.store import StoredResponse
from quire.server.service import RequestRecord, Service

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


async def response(service: Service, record: RequestRecord, body: ResponsesBody) -> Answer:
    """The answer to a request; raises ApiError or InvalidRequestError where there can be none."""
    items = items_of(body)
    if body.previous_response_id is not None:
        earlier = service.responses.get(record.tenant, body.previous_response_id, "previous_response_id")
        items = [*earlier.items, *items]
    tokenizer = service.needs_tokenizer("input")
    with told_in(WORDS):
        chat = chat_of(body, items, tokenizer.chat_template)
        return ResponseAnswer(service, record, await converse(service, record, chat, "resp"), body, items)


class ResponseAnswer(Answer):
    def __init__(self, service: Service, record: RequestRecord, conversation: Conversation, body: ResponsesBody,
                 items: list[InputItem]) -> None:
        super().__init__(service, record, conversation.work, stream=bool(body.stream), options=None)
        self._body = body
        self._input = items
        self._text = ChoiceText(conversation, service.tokenizer)
        self._output = OutputItems(namespaces_of(body))
        self._reason: str | None = None
        self._sequence = 0

    def events(self, place: int, output: RequestOutput) -> bytes:
        found: list[Event] = []
        if not self._text.started:
            self._text.started = True
            found = [{"type": "response.created", "response": self._response("in_progress")},
                     {"type": "response.in_progress", "response": self._response("in_progress")}]
        for each in output.outputs:
            self._reason = finish_reason(each)
            pieces = self._text.push(each.text_delta, each.token_ids_delta, self._reason is not None)
            found += self._output.push(pieces)
        if self._reason is not None:
            found += self._output.end(self._status(self._reason))
        return b"".join(map(self._event, found))

    def tail(self) -> bytes:
        status = self._status(self._reason)
        return self._event({"type": f"response.{status}", "response": self._finished(status)})

    def failure(self, error: ApiError) -> bytes:
        error = in_words(error, WORDS)
        failed = {**self._response("failed"), "error": {"code": error.code or "server_error", "message": str(error)}}
        return self._event({"type": "response.failed", "response": failed})

    def whole(self, found: list[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        each: CompletionOutput = found[0].outputs[0]
        self._reason = finish_reason(each)
        self._output.push(self._text.push(each.text, each.token_ids, True))
        status = self._status(self._reason)
        self._output.end(status)
        return self._finished(status)

    @staticmethod
    def _status(reason: str | None) -> str:
        return "incomplete" if reason == "length" else "completed"

    def _event(self, event: Event) -> bytes:
        event = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        return named_sse(event)

    def _finished(self, status: str) -> dict[str, Any]:
        """The whole response, which is kept if the client does not forbid it."""
        found = self._response(status)
        found["output"] = self._output.items
        found["usage"] = self._usage()
        found["completed_at"] = int(time.time()) if status == "completed" else None
        if self._body.store is not False:
            output = _ITEMS.validate_python(self._output.items)
            size = len(encode(found)) + sum(len(item.model_dump_json()) for item in self._input)
            self.service.responses.put(self.record.tenant, found["id"],
                                       StoredResponse(found, [*self._input, *output], size))
        return found

    def _usage(self) -> dict[str, Any]:
        usage = self.usage_body()
        return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens_details": {"reasoning_tokens": self._text.num_thought_tokens()}}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        given = body.model_dump(by_alias=True, exclude_none=True,
                                include={"tools", "text", "metadata", "reasoning", "user", "tool_choice"})
        return {
            "id": self.work.request_id, "object": "response", "created_at": self.created, "status": status,
            "background": False, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": given.get("metadata", {}), "model": self.service.model_name, "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
            "service_tier": "default", "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "tool_choice": given.get("tool_choice", "auto"), "tools": given.get("tools", []),
            "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled", "usage": None,
            "user": body.user,
        }
